//! Which configuration file `run` uses.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use crate::run::support::{Folder, Process, Upstream, get, one_route, ratekeeper};

/// Writes a configuration whose limit has the name of its file.
fn named(folder: &Folder, upstream: &Upstream, name: &str) -> std::path::PathBuf {
    let limit = format!("limits: {{ {name}: {{ key: ip, fixed_window: {{}} }} }}");
    folder.write(&format!("{name}.yaml"), &one_route(upstream, &limit, ""))
}

/// Starts the command and returns the name of the limit it uses.
async fn used(command: &mut Command) -> String {
    let process = Process::spawn(command);
    let address: SocketAddr = process.address().await;
    let policy = get(address, "/").await.header("ratelimit-policy").unwrap().to_owned();
    policy.split('"').nth(1).unwrap().to_owned()
}

/// Returns `ratekeeper run` in a folder.
fn run_in(folder: &Path) -> Command {
    let mut command = ratekeeper();
    command.arg("run").current_dir(folder);
    command
}

#[tokio::test]
async fn argument_wins_over_the_variable_and_the_variable_over_the_default_file() {
    let (folder, upstream) = (Folder::new("lookup"), Upstream::start().await);
    let (argument, variable) = (named(&folder, &upstream, "argument"), named(&folder, &upstream, "variable"));
    let default = named(&folder, &upstream, "ratekeeper");
    let home = default.parent().unwrap();
    assert_eq!(used(&mut run_in(home)).await, "ratekeeper");
    // A variable that is set to nothing counts as not set.
    assert_eq!(used(run_in(home).env("RATEKEEPER_CONFIG", "")).await, "ratekeeper");
    assert_eq!(used(run_in(home).env("RATEKEEPER_CONFIG", &variable)).await, "variable");
    assert_eq!(used(run_in(home).env("RATEKEEPER_CONFIG", &variable).arg(&argument)).await, "argument");
    for option in ["-c", "--config"] {
        let mut command = run_in(home);
        command.env("RATEKEEPER_CONFIG", &variable).arg(option).arg(&argument);
        assert_eq!(used(&mut command).await, "argument");
    }
    // Relative to the folder in which the command runs.
    assert_eq!(used(run_in(home).arg("argument.yaml")).await, "argument");
    assert_eq!(used(run_in(home).env("RATEKEEPER_CONFIG", "variable.yaml")).await, "variable");
}

/// Runs a command that cannot start; returns its exit code and its messages.
async fn failure(command: &mut Command) -> (i32, String) {
    Process::spawn(command).failure().await
}

#[tokio::test]
async fn missing_file_is_an_error_that_names_the_choices() {
    let (folder, upstream) = (Folder::new("no-file"), Upstream::start().await);
    let good = named(&folder, &upstream, "good");
    let empty = folder.path("empty");
    std::fs::create_dir(&empty).unwrap();
    let expected = "error: no configuration file: there is no `ratekeeper.yaml` in this folder, and RATEKEEPER_CONFIG is \
                    not set\n   = help: write `ratekeeper run FILE`, create a file with `ratekeeper init`, or try the \
                    demo with `ratekeeper`";
    assert_eq!(failure(&mut run_in(&empty)).await, (2, expected.to_owned()));

    let mut validate = ratekeeper();
    let (_, message) = failure(validate.arg("validate").current_dir(&empty)).await;
    assert!(
        message
            .ends_with("= help: write `ratekeeper validate FILE`, or create a file with `ratekeeper init`"),
        "{message}"
    );

    // A named file that is missing is an error; the default file does not replace it.
    named(&folder, &upstream, "ratekeeper");
    let expected =
        "error: cannot read nowhere.yaml: No such file or directory\n   = help: check the path".to_owned();
    let home = good.parent().unwrap();
    assert_eq!(failure(run_in(home).arg("nowhere.yaml")).await, (1, expected.clone()));
    assert_eq!(failure(run_in(home).env("RATEKEEPER_CONFIG", "nowhere.yaml")).await, (1, expected));

    let (code, message) = failure(run_in(home).arg("one.yaml").args(["-c", "two.yaml"])).await;
    assert_eq!(code, 2);
    assert!(message.contains("the argument '[FILE]' cannot be used with '--config <FILE>'"), "{message}");
}
