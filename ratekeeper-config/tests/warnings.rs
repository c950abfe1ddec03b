//! Warnings of valid files.

use crate::common::{golden, read};

/// Each case is a file, a line of dashes, and the expected warnings. To update them, run the tests with
/// `RATEKEEPER_WRITE_GOLDEN=1` and review the difference.
#[test]
fn risks_in_valid_files_are_reported() {
    golden("warnings.txt", |yaml| match read(yaml) {
        Ok(config) => {
            let all: Vec<String> = config.warnings.iter().map(ToString::to_string).collect();
            all.join("\n\n")
        }
        Err(errors) => format!("invalid: {errors}"),
    });
}
