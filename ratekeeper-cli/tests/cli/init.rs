//! `init`: the starter file, by flags and by questions.

use std::path::PathBuf;

use crate::cli::{Output, ratekeeper, run};
use crate::run::support::{Folder, Terminal};

/// Validates a starter file; the secret of Redis is set.
fn validate(path: &str) -> Output {
    ratekeeper(&["validate", path, "--explain"])
        .env("RATEKEEPER_SECRET", "0123456789abcdef")
        .output()
        .unwrap()
        .into()
}

fn text_of(path: &PathBuf) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn each_need_writes_a_valid_file_with_its_algorithm() {
    let folder = Folder::new("init-needs");
    for (need, limit) in [
        ("bursts", "token_bucket: { capacity: 50, refill: 50/h, style: smooth }"),
        ("steady", "leaky_bucket: { capacity: 50, leak: 50/h, mode: shape }"),
        ("simplest", "fixed_window: { limit: 50, window: 1h, align: clock }"),
        ("exact", "sliding_window_log: { limit: 50, window: 1h, count: admitted }"),
        ("unsure", "sliding_window_counter: { limit: 50, window: 1h, buckets: 1, edge: weigh }"),
    ] {
        let path = folder.path(&format!("{need}.yaml"));
        let path = path.to_str().unwrap();
        let answers =
            ["--rate", "50/h", "--key", "ip", "--upstream", "http://127.0.0.1:3000", "--store", "memory"];
        let output = run(&[&["init", "--output", path, "--need", need], &answers[..]].concat(), "");
        let next = format!(
            "{path} written\n\n  check it        ratekeeper validate {path} --explain\n  run it          ratekeeper run {path}\n"
        );
        assert_eq!(output, Output { code: 0, stdout: next, stderr: String::new() });
        let explained = validate(path);
        assert_eq!((explained.code, &*explained.stderr), (0, ""), "{need}");
        assert!(explained.stdout.contains(limit), "{need}: {}", explained.stdout);
    }
}

#[test]
fn every_flag_has_its_effect_on_the_file() {
    let folder = Folder::new("init-flags");
    let effects: [(&[&str], &str); 8] = [
        (&["--rate", "7/s"], "sliding_window_counter: { limit: 7, window: 1s"),
        (&["--rate", "7/min"], "sliding_window_counter: { limit: 7, window: 1m"),
        (&["--rate", "7/day"], "sliding_window_counter: { limit: 7, window: 1d"),
        (&["--key", "global"], "  global "),
        (&["--key", "ip"], "  ip "),
        (&["--key", "header:X-Api-Key"], "{ header: x-api-key, fallback: anonymous }"),
        (&["--upstream", "https://api.example.com/v1"], "https://api.example.com:443/v1"),
        (&["--store", "redis://127.0.0.1:7000"], "redis: limits shared by all instances"),
    ];
    for (number, (flags, effect)) in effects.into_iter().enumerate() {
        let path = folder.path(&format!("{number}.yaml"));
        let path = path.to_str().unwrap();
        assert_eq!(run(&[&["init", "-o", path], flags].concat(), "").code, 0, "{flags:?}");
        let explained = validate(path);
        assert_eq!((explained.code, &*explained.stderr), (0, ""), "{flags:?}");
        assert!(explained.stdout.contains(effect), "{flags:?}: {}", explained.stdout);
    }
}

#[test]
fn file_with_redis_explains_the_secret() {
    let output = run(&["init", "-o", "-", "--store", "redis://127.0.0.1:6379"], "");
    assert_eq!(output.code, 0);
    assert!(output.stdout.contains("\n    secret: \"${RATEKEEPER_SECRET}\""), "{}", output.stdout);
    assert!(
        output.stdout.contains("#   export RATEKEEPER_SECRET=...   # the same for all instances"),
        "{}",
        output.stdout
    );
}

#[test]
fn existing_file_is_kept_unless_forced() {
    let folder = Folder::new("init-exists");
    let path = folder.write("ratekeeper.yaml", "# mine\n");
    let name = path.to_str().unwrap();
    let help = "choose another file with `--output FILE`, or replace this one with `--force`";
    let stderr = format!("error: {name} already exists\n   = help: {help}\n");
    assert_eq!(run(&["init", "-o", name], ""), Output { code: 2, stdout: String::new(), stderr });
    assert_eq!(text_of(&path), "# mine\n");
    assert_eq!(run(&["init", "-o", name, "--force"], "").code, 0);
    assert!(text_of(&path).starts_with("# Ratekeeper: 100 requests per minute.\n"));
    assert_eq!(validate(name).code, 0);
}

/// Without a terminal, a question would wait forever.
#[test]
fn without_a_terminal_the_defaults_are_used_and_named() {
    let folder = Folder::new("init-defaults");
    let path = folder.path("ratekeeper.yaml");
    let name = path.to_str().unwrap();
    let output = run(&["init", "-o", name], "1\n5/s\n");
    let note = "note: stdin is not a terminal, so defaults are used: --need unsure --rate 100/min --key ip \
                --upstream http://127.0.0.1:3000 --store memory\n\n";
    assert_eq!((output.code, &*output.stderr), (0, note));
    // The named flags write the same file.
    let flags = note.split_once("used: ").unwrap().1.split_whitespace();
    let flags: Vec<&str> = ["init", "-o", "-"].into_iter().chain(flags).collect();
    let printed = run(&flags, "");
    assert_eq!((printed.code, &*printed.stderr), (0, ""));
    assert_eq!(printed.stdout, text_of(&path).replace(name, "ratekeeper.yaml"));
}

#[test]
fn invalid_flags_are_rejected_with_an_example_and_write_nothing() {
    let folder = Folder::new("init-invalid");
    let path = folder.path("ratekeeper.yaml");
    for (flag, value, help) in [
        ("--rate", "100", "write requests per second, minute, hour or day, as in `100/min`"),
        ("--key", "cookie", "write `ip`, `global`, or a header as in `header:X-User-Id`"),
        ("--key", "header:X User", "write `ip`, `global`, or a header as in `header:X-User-Id`"),
        ("--upstream", "127.0.0.1:3000", "write a URL, as in `http://127.0.0.1:3000`"),
        ("--store", "redis", "write `memory`, or an address as in `redis://127.0.0.1:6379`"),
    ] {
        let stderr = format!("error: invalid value `{value}` for `{flag}`\n   = help: {help}\n");
        let output = run(&["init", "-o", path.to_str().unwrap(), flag, value], "");
        assert_eq!(output, Output { code: 2, stdout: String::new(), stderr });
    }
    // A value with the right form that the configuration rejects.
    let output = run(&["init", "-o", path.to_str().unwrap(), "--upstream", "http://a b"], "");
    assert_eq!((output.code, &*output.stdout), (2, ""));
    assert!(output.stderr.starts_with("error: ") && output.stderr.ends_with("\n1 error\n"), "{output:?}");
    assert!(output.stderr.contains("--> generated file, not written:"), "{output:?}");
    assert!(!path.exists());
}

#[tokio::test]
async fn questions_on_a_terminal_write_the_chosen_file() {
    let folder = Folder::new("init-questions");
    let path = folder.path("ratekeeper.yaml");
    let mut terminal = Terminal::start(&ratekeeper(&["init", "-o", path.to_str().unwrap()]));
    terminal.answer("Choose 1 to 5 [5] ", "9").await;
    terminal.answer("write a number from 1 to 5\nChoose 1 to 5 [5] ", "3").await;
    terminal.answer("Requests per period [100/min] ", "20/s").await;
    terminal.answer("(ip, header:NAME, or global for one budget in all)? [ip] ", "header:X-Tenant").await;
    // Enter takes the default.
    terminal.answer("[http://127.0.0.1:3000] ", "").await;
    terminal
        .answer("Where are limits kept (memory, or redis://HOST:PORT to share them)? [memory] ", "")
        .await;
    assert_eq!(terminal.ended().await, 0);
    assert!(terminal.text().contains("written\n"), "{}", terminal.text());
    assert!(terminal.text().contains("  3  The simplest limit to explain             (fixed window)\n"));
    let explained = validate(path.to_str().unwrap());
    assert_eq!((explained.code, &*explained.stderr), (0, ""));
    for text in [
        "fixed_window: { limit: 20, window: 1s",
        "{ header: x-tenant, fallback: anonymous }",
        "http://127.0.0.1:3000",
    ] {
        assert!(explained.stdout.contains(text), "{text}: {}", explained.stdout);
    }
}

/// The number of instances decides the share of each of them, so it is asked for and never assumed on a terminal.
#[tokio::test]
async fn init_asks_how_many_instances_share_redis() {
    let folder = Folder::new("init-instances");
    let path = folder.path("ratekeeper.yaml");
    let flags = ["--need", "exact", "--rate", "1/s", "--key", "ip", "--upstream", "http://127.0.0.1:3000"];
    let mut terminal =
        Terminal::start(&ratekeeper(&[&["init", "-o", path.to_str().unwrap()], &flags[..]].concat()));
    terminal.answer("to share them)? [memory] ", "redis://127.0.0.1:6379").await;
    terminal.answer("How many instances share the limits? [1] ", "0").await;
    terminal.answer("write a whole number from 1 to 100000\nHow many", "4").await;
    assert_eq!(terminal.ended().await, 0);
    assert!(text_of(&path).contains("\n    instances: 4\n"));
}

#[test]
fn instances_flag_is_written_and_needs_redis() {
    let redis = ["init", "-o", "-", "--store", "redis://127.0.0.1:6379"];
    let output = run(&[&redis[..], &["--instances", "3"]].concat(), "");
    assert!(output.stdout.contains("\n    instances: 3\n"), "{output:?}");
    let output = run(&redis, "");
    assert!(output.stderr.ends_with("--upstream http://127.0.0.1:3000 --instances 1\n\n"), "{output:?}");
    let output = run(&["init", "-o", "-", "--store", "memory", "--instances", "3"], "");
    let stderr = "error: `--instances` has no effect on `--store memory`\n   = help: write `--store redis://HOST:PORT`, or remove `--instances`\n";
    assert_eq!(output, Output { code: 2, stdout: String::new(), stderr: stderr.to_owned() });
}

/// Ctrl-D at a question ends the command; half of the answers are not a configuration.
#[tokio::test]
async fn end_of_input_at_a_question_writes_nothing() {
    for flags in [&[][..], &["--need", "exact", "--rate", "1/s"]] {
        let folder = Folder::new("init-end");
        let path = folder.path("ratekeeper.yaml");
        let args = [&["init", "-o", path.to_str().unwrap()], flags].concat();
        let mut terminal = Terminal::start(&ratekeeper(&args));
        terminal.shows("] ").await;
        terminal.press_ctrl_d();
        assert_eq!(terminal.ended().await, 1);
        let text = terminal.text();
        assert!(text.contains("error: the input ended, nothing written\n   = help: "), "{text}");
        assert!(!path.exists());
    }
}

/// Flags answer their question.
#[tokio::test]
async fn init_asks_only_for_missing_flags() {
    let folder = Folder::new("init-some");
    let path = folder.path("ratekeeper.yaml");
    let flags = ["--need", "exact", "--rate", "1/s", "--key", "ip", "--store", "memory"];
    let mut terminal =
        Terminal::start(&ratekeeper(&[&["init", "-o", path.to_str().unwrap()], &flags[..]].concat()));
    terminal
        .answer("Where does the gateway forward requests? [http://127.0.0.1:3000] ", "http://127.0.0.1:4000")
        .await;
    assert_eq!(terminal.ended().await, 0);
    assert!(!terminal.text().contains("Choose 1 to 5"), "{}", terminal.text());
    assert!(text_of(&path).contains("upstream: http://127.0.0.1:4000\n"));
}
