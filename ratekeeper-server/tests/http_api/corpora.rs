//! Runs the fuzzer's property on its corpus without a fuzzer, and on bodies composed from fragments of JSON.

use std::fs;
use std::path::Path;

use proptest::prelude::*;

#[path = "../../../fuzz/properties/check.rs"]
mod property;

/// Fewest files: fewer would leave most of the property untested.
const FILES_MIN: usize = 24;

#[test]
fn check_property_holds_for_every_corpus_file() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/check");
    let mut files: Vec<_> = fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= FILES_MIN, "{} inputs", files.len());
    for file in files {
        let input = fs::read(&file).unwrap();
        let result = std::panic::catch_unwind(|| property::check(&input));
        assert!(result.is_ok(), "{}", file.display());
    }
}

/// Fragments that are almost a valid body.
fn fragments() -> impl Strategy<Value = Vec<u8>> {
    let fragment = prop_oneof![
        prop::sample::select(vec![
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"limit\"",
            "\"key\"",
            "\"cost\"",
            "\"checks\"",
            "\"expires\"",
            "\"reservation\"",
            "\"deny_status\"",
            "\"u\"",
            "\"a\"",
            "\"60s\"",
            "429",
            "0",
            "1",
            "10",
            "-1",
            "4294967295",
            "null",
            "{\"limit\":\"u\",\"key\":\"a\"}",
            "{\"limit\":\"a\",\"cost\":",
        ])
        .prop_map(|text| text.as_bytes().to_vec()),
        prop::collection::vec(any::<u8>(), 0..4),
    ];
    (0..6_u8, prop::collection::vec(fragment, 0..16)).prop_map(|(path, fragments)| {
        let mut input = vec![path];
        input.extend(fragments.concat());
        input
    })
}

proptest! {
    #![proptest_config(testbed::property::cases(4_000))]

    #[test]
    fn check_property_holds_for_fragments_of_json(input in fragments()) {
        property::check(&input);
    }
}
