//! Files of the repository that are derived from the code.

use std::fs;
use std::path::Path;

/// Set by `cargo xtask generate`: generated files are written instead of compared.
const GENERATE: &str = "RATEKEEPER_GENERATE";

/// Compares a file of the repository with the text that the code derives for it. `cargo xtask generate` runs the tests
/// whose names contain `generated` and lets this function write the files.
///
/// # Panics
/// If the file differs or cannot be written.
#[track_caller]
#[expect(clippy::panic, reason = "a file that is out of date fails its test")]
pub fn assert_generated(path: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path);
    if std::env::var_os(GENERATE).is_some() {
        let folder = file.parent().unwrap_or(&file);
        let written = fs::create_dir_all(folder).and_then(|()| fs::write(&file, text));
        return written.unwrap_or_else(|error| panic!("cannot write {path}: {error}"));
    }
    let current = fs::read_to_string(&file).unwrap_or_default();
    let number = current.lines().zip(text.lines()).take_while(|(is, expected)| is == expected).count();
    let line = |text: &str| text.lines().nth(number).unwrap_or("(end of file)").to_owned();
    assert!(
        current == text,
        "{path} is out of date: run `cargo xtask generate`\n  line {} is:        {}\n  it should be: {}",
        number + 1,
        line(&current),
        line(text),
    );
}
