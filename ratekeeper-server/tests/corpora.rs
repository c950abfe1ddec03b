//! Runs the fuzzer's properties on its corpora (seeds and past findings) without a fuzzer, so that they are built and
//! hold with every change.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::fs;
use std::path::Path;

#[path = "../../fuzz/properties/mod.rs"]
mod properties;

/// Most bytes of all corpora: every test run reads them.
const BYTES_MAX: usize = 300_000;
/// Fewest files per corpus: fewer would leave most of a property untested.
const FILES_MIN: usize = 24;

#[test]
fn properties_hold_for_every_corpus_file() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    let mut bytes = 0;
    for (name, check) in properties::TARGETS {
        let mut files: Vec<_> =
            fs::read_dir(corpora.join(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(files.len() >= FILES_MIN, "{name} has {} inputs", files.len());
        for file in files {
            let input = fs::read(&file).unwrap();
            bytes += input.len();
            // The panic names the violated property; this assertion names the file.
            let result = std::panic::catch_unwind(|| check(&input));
            assert!(result.is_ok(), "{} of {name}", file.display());
        }
    }
    assert!(bytes <= BYTES_MAX, "{bytes} bytes exceed the limit of {BYTES_MAX}");
}

/// Random bytes from a fixed seed.
#[test]
fn parser_property_holds_for_random_bytes() {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    for _ in 0..testbed::ordinary_or_long(5_000, 20_000) {
        let length = usize::from(random());
        let input: Vec<u8> = (0..length).map(|_| random()).collect();
        properties::resp::check(&input);
    }
}
