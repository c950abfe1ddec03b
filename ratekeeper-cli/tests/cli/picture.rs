//! `--format svg`: reports as pictures.

use crate::cli::{DEMO, run, simulate};

/// README.md shows this picture, so it must be the command's current output.
#[test]
fn checked_in_picture_is_current() {
    const STORED: &str = include_str!("../../../docs/pictures/compare.svg");
    let ended = run(&["simulate", "--compare", "--format", "svg"], "");
    assert_eq!((ended.code, &*ended.stderr), (0, ""));
    assert!(
        ended.stdout == STORED,
        "docs/pictures/compare.svg is out of date; `cargo xtask pictures` writes it again"
    );
}

#[test]
fn picture_of_one_limit_has_a_row_per_key() {
    let ended =
        run(&["simulate", "--limit", "fixed_window:", "--trace", DEMO, "--format", "svg", "--keys", "2"], "");
    assert_eq!((ended.code, &*ended.stderr), (0, ""));
    for name in ["all requests", "scraper", "batch-job", "other keys"] {
        assert!(ended.stdout.contains(&format!(">{name}</text>")), "{name}: {}", ended.stdout);
    }
    assert!(!ended.stdout.contains("web-app"), "{}", ended.stdout);
}

/// Key names are the user's data, but they reach a browser.
#[test]
fn markup_in_keys_is_escaped() {
    let shown = simulate("token_bucket:", &["--format", "svg"], "time,key\n1,<b>&\x1b\n").stdout;
    assert!(shown.contains(">&lt;b&gt;&amp;\u{fffd}</text>"), "{shown}");
}

#[test]
fn empty_trace_is_drawn_without_error() {
    for limit in [["--compare", "--progress=never"], ["--limit", "token_bucket:"]] {
        let ended = run(&[&["simulate", "--trace", "-", "--format", "svg"], &limit[..]].concat(), "time\n");
        assert_eq!((ended.code, &*ended.stderr), (0, ""));
        assert!(ended.stdout.ends_with("</svg>\n"), "{}", ended.stdout);
    }
}
