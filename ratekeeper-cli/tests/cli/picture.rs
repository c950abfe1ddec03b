//! `--format svg`: reports as pictures.

use crate::cli::{DEMO, run, simulate};

/// README.md shows this picture, so it must be the command's current output.
#[test]
fn checked_in_picture_is_current() {
    const STORED: &str = include_str!("../../../docs/pictures/compare.svg");
    let output = run(&["simulate", "--compare", "--format", "svg"], "");
    assert_eq!((output.code, &*output.stderr), (0, ""));
    assert!(
        output.stdout == STORED,
        "docs/pictures/compare.svg is out of date; `cargo xtask pictures` writes it again"
    );
}

#[test]
fn picture_of_one_limit_has_a_row_per_key() {
    let output =
        run(&["simulate", "--limit", "fixed_window:", "--trace", DEMO, "--format", "svg", "--keys", "2"], "");
    assert_eq!((output.code, &*output.stderr), (0, ""));
    for name in ["all requests", "scraper", "batch-job", "other keys"] {
        assert!(output.stdout.contains(&format!(">{name}</text>")), "{name}: {}", output.stdout);
    }
    assert!(!output.stdout.contains("web-app"), "{}", output.stdout);
}

/// Key names are the user's data, but they reach a browser.
#[test]
fn markup_in_keys_is_escaped() {
    let report = simulate("token_bucket:", &["--format", "svg"], "time,key\n1,<b>&\x1b\n").stdout;
    assert!(report.contains(">&lt;b&gt;&amp;\u{fffd}</text>"), "{report}");
}

#[test]
fn empty_trace_is_drawn_without_error() {
    for limit in [["--compare", "--progress=never"], ["--limit", "token_bucket:"]] {
        let output = run(&[&["simulate", "--trace", "-", "--format", "svg"], &limit[..]].concat(), "time\n");
        assert_eq!((output.code, &*output.stderr), (0, ""));
        assert!(output.stdout.ends_with("</svg>\n"), "{}", output.stdout);
    }
}
