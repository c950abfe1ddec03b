//! `completions` and `man`.

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::cli::run;

const SUBCOMMANDS: [&str; 8] =
    ["run", "validate", "init", "simulate", "migrate", "schema", "completions", "man"];

#[test]
fn completion_scripts_name_every_subcommand() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&["completions", shell], "");
        assert_eq!((output.code, &*output.stderr), (0, ""), "{shell}");
        for subcommand in SUBCOMMANDS {
            let is_named = output.stdout.split(|c: char| !c.is_alphanumeric()).any(|word| word == subcommand);
            assert!(is_named, "{shell}: {subcommand}");
        }
        assert!(output.stdout.contains("log-format"), "{shell}");
    }
}

#[test]
fn bash_accepts_its_completion_script() {
    let script = run(&["completions", "bash"], "").stdout;
    // Completes `ratekeeper va` as bash does.
    let complete = "\nCOMP_WORDS=(ratekeeper va)\nCOMP_CWORD=1\n_ratekeeper ratekeeper va ratekeeper\necho \"${COMPREPLY[@]}\"\n";
    let mut bash = Command::new("bash");
    let mut bash =
        bash.arg("-s").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    bash.stdin.take().unwrap().write_all((script + complete).as_bytes()).unwrap();
    let output = bash.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "validate\n");
}

#[test]
fn unknown_shell_is_rejected_with_the_known_ones() {
    let output = run(&["completions", "cmd"], "");
    assert_eq!((output.code, &*output.stdout), (2, ""));
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(output.stderr.contains(shell), "{}", output.stderr);
    }
}

#[test]
fn manual_has_a_page_for_each_subcommand() {
    let output = run(&["man"], "");
    assert_eq!((output.code, &*output.stderr), (0, ""));
    let version = env!("CARGO_PKG_VERSION");
    assert!(
        output.stdout.contains(&format!(".TH ratekeeper 1  \"ratekeeper {version}\"")),
        "{}",
        output.stdout
    );
    for subcommand in SUBCOMMANDS {
        for text in [
            format!("\nratekeeper\\-{subcommand}(1)\n"),
            format!(".TH ratekeeper-{subcommand} 1  \"ratekeeper {version}\""),
            format!("\n\\fBratekeeper {subcommand}\\fR "),
        ] {
            assert!(output.stdout.contains(&text), "{text} is missing");
        }
    }
    // Every line that starts with a dot is a macro of the page format.
    let macros = [".TH", ".SH", ".TP", ".PP", ".br", ".ie", ".el", ".RS", ".RE", ".IP", ".nf", ".fi"];
    for line in output.stdout.lines().filter(|line| line.starts_with('.')) {
        assert!(macros.iter().any(|it| line.split(' ').next() == Some(it)), "{line}");
    }
}
