//! Output for people: the banner, a line per request, and the summary.

use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::Value;
use testbed::wait_until;

use crate::run::support::{Client, Folder, Process, Terminal, Upstream, ratekeeper};

const ESCAPE: char = '\x1b';
const RED: &str = "\x1b[1;31m";
const GREEN: &str = "\x1b[32m";
const OFF: &str = "\x1b[0m";

/// Writes a configuration with two limits and a shadow limit of which the second denies the third request of a user.
fn config(folder: &Folder, upstream: &Upstream) -> PathBuf {
    let text = format!(
        "limits:\n  \
           total: {{ key: global, fixed_window: {{ limit: 1000, window: 1h }} }}\n  \
           per-user: {{ key: {{ header: X-User-Id }}, fixed_window: {{ limit: 2, window: 1w, align: first_request }} }}\n  \
           planned: {{ key: {{ header: X-User-Id }}, fixed_window: {{ limit: 1, window: 1w, align: first_request }}, shadow: true }}\n\
         log: {{ keys: text }}\n\
         paths: {{ case: exact }}\n\
         admin: 127.0.0.1:0\n\
         apis: {{ http: 127.0.0.1:0 }}\n\
         gateway:\n  listen: 127.0.0.1:0\n  routes:\n    \
           - {{ id: limited, path: /limited, upstream: \"http://{0}\", limits: [total, per-user, planned] }}\n    \
           - {{ id: open, upstream: \"http://{0}\", limits: none }}\n",
        upstream.address()
    );
    folder.write("ratekeeper.yaml", &text)
}

fn run(file: &Path) -> Command {
    let mut command = ratekeeper();
    command.arg("run").arg(file);
    command
}

/// Returns the client of the gateway in the banner.
fn client_of(banner: &str) -> Client {
    let url = banner.lines().find_map(|line| line.strip_prefix("  gateway   http://")).unwrap();
    Client::new(url.parse().unwrap())
}

/// Sends three requests of alice, of which the last is denied, and one without limits.
async fn send_requests(client: &mut Client) {
    for status in [200, 200, 429] {
        assert_eq!(client.get("/limited", "X-User-Id: alice\r\n").await.unwrap().status, status);
    }
    assert_eq!(client.get("/free?query=hidden", "").await.unwrap().status, 200);
}

/// Checks that a line starts with a time of day; returns the rest.
fn after_time(line: &str) -> &str {
    let (time, rest) = line.split_at(8);
    let is_time = time.char_indices().all(|(at, c)| if at % 3 == 2 { c == ':' } else { c.is_ascii_digit() });
    assert!(is_time, "{line}");
    rest
}

/// The lines of the access log, without their times.
fn request_lines(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.contains(" GET ")).map(after_time).collect()
}

/// Replaces the wait in `retry in 6d 23h`, which depends on the time that passes.
fn without_wait(line: &str) -> String {
    let Some((before, wait)) = line.split_once("retry in ") else { return line.to_owned() };
    assert!(wait == "7d" || wait.starts_with("6d 23h"), "{line}");
    format!("{before}retry in N")
}

fn expected_lines(green: &str, red: &str, off: &str) -> Vec<String> {
    vec![
        format!(" {green}200{off} GET    /limited                  alice             per-user: 1 left"),
        format!(" {green}200{off} GET    /limited                  alice             per-user: 0 left"),
        format!(" {red}429{off} GET    /limited                  alice             per-user: retry in N"),
        format!(" {green}200{off} GET    /free                   "),
    ]
}

#[tokio::test]
async fn terminal_shows_the_banner_a_line_per_request_and_a_summary_at_ctrl_c() {
    let (folder, upstream) = (Folder::new("terminal"), Upstream::start().await);
    let file = config(&folder, &upstream);
    let mut terminal = Terminal::start(&run(&file));
    let banner = terminal.shows("Ctrl-C shuts down. Each request is a line below.").await;
    let first = format!("\nRatekeeper {}, configuration {}\n\n", env!("CARGO_PKG_VERSION"), file.display());
    assert!(banner.starts_with(&first), "{banner}");
    for (service, ending) in [("gateway   ", ""), ("HTTP API  ", "/v1/check"), ("admin     ", "/metrics")] {
        let start = format!("  {service}http://127.0.0.1:");
        let line = banner.lines().find(|line| line.starts_with(&start));
        assert!(line.is_some_and(|line| line.ends_with(ending)), "{service}: {banner}");
    }
    send_requests(&mut client_of(&banner)).await;
    let text = terminal.shows("/free").await;
    let lines: Vec<String> = request_lines(&text).into_iter().map(without_wait).collect();
    assert_eq!(lines, expected_lines(GREEN, RED, OFF));
    assert!(!text.contains("hidden"), "{text}");

    terminal.press_ctrl_c();
    assert_eq!(terminal.ended().await, 0);
    let text = terminal.text();
    let (_, summary) = text.split_once("\n4 requests in ").unwrap();
    let (time, summary) = summary.split_once("s: ").unwrap();
    assert!(time.parse::<u32>().is_ok(), "{text}");
    assert_eq!(
        summary,
        "3 allowed, 1 denied\n\n  limit       allowed     denied\n  planned           1          2  shadow: not enforced\n  \
         per-user          2          1\n  total             3          0\n"
    );
}

#[tokio::test]
async fn no_color_and_dumb_terminals_get_no_escape_codes() {
    let (folder, upstream) = (Folder::new("no-color"), Upstream::start().await);
    let file = config(&folder, &upstream);
    for (name, value) in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let mut terminal = Terminal::start(run(&file).env(name, value));
        let banner = terminal.shows("Ctrl-C shuts down").await;
        send_requests(&mut client_of(&banner)).await;
        terminal.shows("/free").await;
        terminal.press_ctrl_c();
        assert_eq!(terminal.ended().await, 0);
        let text = terminal.text();
        assert!(!text.contains(ESCAPE), "{name}: {text:?}");
        let lines: Vec<String> = request_lines(&text).into_iter().map(without_wait).collect();
        assert_eq!(lines, expected_lines("", "", ""));
    }
}

#[tokio::test]
async fn json_format_on_a_terminal_prints_only_json() {
    let (folder, upstream) = (Folder::new("json-terminal"), Upstream::start().await);
    let file = config(&folder, &upstream);
    let mut terminal = Terminal::start(run(&file).args(["--log-format", "json"]));
    let text = terminal.shows(r#""service":"gateway","url":"http://"#).await;
    let address =
        text.split(r#""service":"gateway","url":"http://"#).nth(1).unwrap().split('"').next().unwrap();
    send_requests(&mut Client::new(address.parse().unwrap())).await;
    terminal.shows(r#""path":"/free""#).await;
    terminal.press_ctrl_c();
    assert_eq!(terminal.ended().await, 0);
    // The terminal echoes the key.
    let text = terminal.text().replace("^C", "");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().filter(|line| line["message"] == "request").count(), 4, "{text}");
    assert_eq!(lines.last().unwrap()["message"], "shut down", "{text}");
}

#[tokio::test]
async fn human_format_without_a_terminal_prints_readable_lines_without_color() {
    let (folder, upstream) = (Folder::new("human-pipe"), Upstream::start().await);
    let file = config(&folder, &upstream);
    let mut process = Process::spawn(run(&file).args(["--log-format", "human"]));
    process.line("Ctrl-C shuts down").await;
    send_requests(&mut client_of(&process.stderr().join("\n"))).await;
    wait_until(|| process.stdout().len() == 4).await;
    process.signal(Signal::SIGINT);
    assert_eq!(process.ended().await, 0);
    process.line("per-user          2          1").await;
    let (stdout, stderr) = (process.stdout().join("\n"), process.stderr().join("\n"));
    assert!(!stdout.contains(ESCAPE) && !stderr.contains(ESCAPE), "{stdout}\n{stderr}");
    let lines: Vec<String> = request_lines(&stdout).into_iter().map(without_wait).collect();
    assert_eq!(lines, expected_lines("", "", ""));
    let shut_down = stderr.lines().find(|line| line.ends_with("shut down")).unwrap();
    assert_eq!(after_time(shut_down), " INFO shut down");
}

/// Errors of a reload are shown with the marked line, not as one escaped string.
#[tokio::test]
async fn failed_reload_is_readable_on_a_terminal() {
    let (folder, upstream) = (Folder::new("reload-terminal"), Upstream::start().await);
    let file = config(&folder, &upstream);
    let mut terminal = Terminal::start(run(&file).env("NO_COLOR", "1"));
    terminal.shows("Ctrl-C shuts down").await;
    let bad = std::fs::read_to_string(&file).unwrap().replace("limit: 1000", "limit: 0");
    folder.write("ratekeeper.yaml", &bad);
    let text = terminal.shows("1 error\n").await;
    let (line, errors) =
        text.split_once("ERROR configuration not reloaded, the old one stays active file=").unwrap();
    after_time(line.lines().last().unwrap());
    let marked = "\n   2 |   total: { key: global, fixed_window: { limit: 0, window: 1h } }\n";
    assert!(
        errors.contains("\n  error: ") && errors.contains(marked) && errors.contains("      ^\n"),
        "{text}"
    );
    terminal.press_ctrl_c();
    assert_eq!(terminal.ended().await, 0);
}

/// Without an access log, the banner does not announce one.
#[tokio::test]
async fn banner_without_an_access_log_announces_no_request_lines() {
    let folder = Folder::new("banner-apis");
    let file = folder.write("ratekeeper.yaml", "apis: { resp: 127.0.0.1:0 }\nadmin: off\n");
    let mut terminal = Terminal::start(&run(&file));
    let banner = terminal.shows("Ctrl-C shuts down.\n\n").await;
    assert!(banner.contains("\n  Redis API  redis://127.0.0.1:"), "{banner}");
    terminal.press_ctrl_c();
    assert_eq!(terminal.ended().await, 0);
    let text = terminal.text();
    let summary = text.split_once("shut down\n\n").unwrap().1;
    assert!(summary.starts_with("Ran for ") && summary.lines().count() == 1, "{text}");
}
