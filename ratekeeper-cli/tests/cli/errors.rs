//! Errors for invalid input and missing files.

use crate::cli::{Output, file, run, simulate};

fn error(code: i32, stderr: &str) -> Output {
    Output { code, stdout: String::new(), stderr: stderr.to_owned() }
}

#[test]
fn invalid_limit_is_shown_with_its_position() {
    assert_eq!(
        simulate("token_bucket: { capcity: 10 }", &[], "time\n1\n"),
        error(
            2,
            "error: unknown field `capcity` in `token_bucket`
  --> --limit:1:17
   |
 1 | token_bucket: { capcity: 10 }
   |                 ^^^^^^^
   = help: did you mean `capacity`? Fields: capacity, refill, style
"
        )
    );
}

#[test]
fn invalid_limit_file_is_shown_by_name() {
    file("wrong.yaml", "fixed_window:\n  limit: 0\n");
    assert_eq!(
        run(&["simulate", "--limit-file", "wrong.yaml", "--trace", "-"], "time\n1\n"),
        error(
            2,
            "error: `limit` is 0, which would deny every request
  --> wrong.yaml:2:10
   |
 2 |   limit: 0
   |          ^
   = help: write a whole number from 1 to 4294967295
"
        )
    );
    file("latin.yaml", b"fixed_window: { } # \xe9\n");
    assert_eq!(
        run(&["simulate", "--limit-file", "latin.yaml", "--trace", "-"], ""),
        error(2, "error: latin.yaml is not UTF-8\n   = help: save the file as UTF-8\n")
    );
    file("large.yaml", "#".repeat(2_000_000));
    assert_eq!(
        run(&["simulate", "--limit-file", "large.yaml", "--trace", "-"], ""),
        error(
            2,
            "error: large.yaml has more than 1000000 bytes, the maximum of a configuration\n   = help: check that this \
             is the right file\n"
        )
    );
}

#[test]
fn invalid_trace_is_shown_by_line_and_column() {
    file("wrong.csv", "time,key,cost\n1,a,1\n2,b,-3\n");
    for options in [&["--format", "table"][..], &["--compare"]] {
        let args = [&["simulate", "--limit", "token_bucket:", "--trace", "wrong.csv"], options].concat();
        assert_eq!(
            run(&args, ""),
            error(
                2,
                "error: in column cost, `-3` is negative\n  --> wrong.csv:3\n   = help: write a whole number from 0 to \
                 4294967295, or nothing for 1\n"
            )
        );
    }
}

#[test]
fn missing_file_exits_with_1() {
    for args in [
        ["--limit", "token_bucket:", "--trace", "nowhere.csv"],
        ["--limit-file", "nowhere.csv", "--trace", "-"],
    ] {
        assert_eq!(
            run(&[&["simulate"], &args[..]].concat(), ""),
            error(
                1,
                "error: cannot read nowhere.csv: No such file or directory\n   = help: check the path\n"
            )
        );
    }
}

#[test]
fn folder_as_trace_is_an_error() {
    assert_eq!(
        run(&["simulate", "--limit", "token_bucket:", "--trace", "."], ""),
        error(
            1,
            "error: cannot read .: Is a directory\n   = help: write the path of a file, not of a folder\n"
        )
    );
}

#[test]
fn compare_with_jsonl_is_rejected() {
    assert_eq!(
        run(&["simulate", "--compare", "--format", "jsonl"], ""),
        error(
            2,
            "error: --format jsonl prints the decisions of one limit, and --compare has five\n   = help: leave one \
             of the two out\n"
        )
    );
}

#[test]
fn missing_or_unknown_arguments_are_named() {
    for (args, expected) in [
        (&["simulate", "--trace", "-"][..], "--limit <YAML>"),
        (&["simulate", "--limit", "token_bucket:"], "--trace <FILE>"),
        (
            &["simulate", "--limit", "token_bucket:", "--limit-file", "x", "--trace", "-"],
            "cannot be used with",
        ),
        (&["simulat"], "a similar subcommand exists: 'simulate'"),
        (&["simulate", "--compere"], "a similar argument exists: '--compare'"),
        (&["simulate", "--compare", "--max-keys", "0"], "at least one key is needed"),
        (&["simulate", "--compare", "--keys", "few"], "invalid value 'few'"),
    ] {
        let output = run(args, "");
        assert_eq!((output.code, &*output.stdout), (2, ""), "{args:?}");
        assert!(output.stderr.contains(expected), "{args:?}\n{}", output.stderr);
    }
}

#[test]
fn help_shows_valid_examples() {
    for args in [&["--help"][..], &["help"], &["simulate", "--help"], &["help", "simulate"], &["--version"]] {
        let output = run(args, "");
        assert_eq!((output.code, &*output.stderr), (0, ""), "{args:?}");
    }
    let help = run(&["simulate", "--help"], "").stdout;
    assert!(help.contains(
        "ratekeeper simulate --limit 'token_bucket: { capacity: 5, refill: 1/s }' --trace trace.csv"
    ));
    for line in
        help.lines().filter(|line| line.contains(": ") && line.contains('{') && !line.contains("--limit"))
    {
        let yaml = line.trim();
        assert!(ratekeeper_config::parse_limit(yaml).is_ok(), "the help shows a limit that is none: {yaml}");
    }
}
