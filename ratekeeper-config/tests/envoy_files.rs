//! Files of Envoy's reference rate limit service: their meaning, lookups after migration, and error messages.
//!
//! `envoy/good` has files, each with the expected results of lookups. `envoy/bad` has one file per mistake, with the
//! expected messages. All files were written for these tests.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot be set up has failed")]

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use ratekeeper_config::envoy::{DESCRIPTORS_MAX, Data, Descriptor, DescriptorLimit, migrate};
use ratekeeper_config::{Config, to_yaml};
use serde_json::{Value as Json, json};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/envoy");

/// The files of a directory: name, text, and the path of the expected results.
fn files(folder: &str) -> Vec<(String, String, PathBuf)> {
    let all = fs::read_dir(Path::new(FOLDER).join(folder)).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<_> = all.filter(|path| path.extension().is_some_and(|end| end == "yaml")).collect();
    all.sort();
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    all.into_iter()
        .map(|path| (name(&path), fs::read_to_string(&path).unwrap(), path.with_extension("txt")))
        .collect()
}

/// Replaces the code points that stand for invisible characters.
fn typed(text: &str) -> String {
    [("<U+200E>", "\u{200e}"), ("<U+FEFF>", "\u{feff}"), ("<U+9>", "\t")]
        .into_iter()
        .fold(text.to_owned(), |text, (name, typed)| text.replace(name, typed))
}

type Entries = Vec<(String, String)>;

/// Each line is a list of entries and the result of its lookup.
fn cases(text: &str) -> Vec<(Entries, String)> {
    let case = |line: &str| {
        let (entries, found) = line.rsplit_once(" -> ").expect("an arrow in each line");
        let entry = |text: &str| {
            let (key, value) = text.split_once('=').expect("a key and a value in each entry");
            (typed(key), typed(value))
        };
        (entries.split(" | ").map(entry).collect(), found.to_owned())
    };
    text.lines().map(case).collect()
}

fn config(yaml: &str) -> Config {
    crate::common::read(yaml).unwrap_or_else(|errors| panic!("{errors}\n{yaml}"))
}

fn as_json(data: &Data) -> Json {
    match data {
        Data::Null => Json::Null,
        Data::Bool(is) => (*is).into(),
        Data::Number(number) => (*number).into(),
        Data::Text(text) => text.as_str().into(),
        Data::List(items) => items.iter().map(as_json).collect(),
        Data::Map(entries) => entries.iter().map(|(name, data)| (name.clone(), as_json(data))).collect(),
    }
}

/// A descriptor in the notation of the cases.
fn shown(config: &Config, found: &Descriptor) -> String {
    let mut text = match found.limit {
        DescriptorLimit::None => "no limit".to_owned(),
        DescriptorLimit::Unlimited => "unlimited".to_owned(),
        DescriptorLimit::Blocked => format!("0 {}", found.unit.unwrap().name()),
        DescriptorLimit::Rule(number) => {
            let rule = config.rules.rule(number);
            assert!(to_yaml(&rule.limit).ends_with("align: clock }"), "{rule:?}");
            assert_eq!((rule.is_shadow, rule.limit.limit()), (found.is_shadow, found.requests_per_unit));
            format!("{} {}", found.requests_per_unit, found.unit.unwrap().name())
        }
    };
    for (is, word) in [(found.is_shadow, " shadow"), (found.is_quota, " quota"), (found.shares, " shared")] {
        text += if is { word } else { "" };
    }
    text += &found.name.as_ref().map(|name| format!(" name={name}")).unwrap_or_default();
    if !found.replaces.is_empty() {
        text += &format!(" replaces={}", found.replaces.join(","));
    }
    let metadata = found.metadata.clone().map(|metadata| as_json(&Data::Map(metadata)));
    text + &metadata.map(|it| format!(" metadata={it}")).unwrap_or_default()
}

/// Whether a pattern matches: a simple reference implementation.
fn fits(pattern: &[u8], value: &[u8]) -> bool {
    match (pattern, value) {
        ([], _) => value.is_empty(),
        ([b'*', rest @ ..], _) => (0..=value.len()).any(|from| fits(rest, &value[from..])),
        ([wanted, rest @ ..], [first, others @ ..]) => wanted == first && fits(rest, others),
        _ => false,
    }
}

/// The limit of a list of entries, looked up in the original file as documented, independent of the tested code.
fn looked_up(file: &Json, entries: &[(String, String)]) -> String {
    let text = |node: &Json, name: &str| match &node[name] {
        Json::Null => String::new(),
        Json::String(text) => text.clone(),
        other => other.to_string(),
    };
    let (mut level, mut found) = (&file["descriptors"], None);
    for (key, value) in entries {
        let of_key: Vec<&Json> =
            level.as_array().into_iter().flatten().filter(|it| text(it, "key") == *key).collect();
        let with = |is: &dyn Fn(&str) -> bool| of_key.iter().find(|it| is(&text(it, "value"))).copied();
        let exact = with(&|it| !it.is_empty() && !it.contains('*') && it == value);
        let pattern = || with(&|it| it.contains('*') && fits(it.as_bytes(), value.as_bytes()));
        let next = exact.or_else(pattern).or_else(|| with(&str::is_empty));
        let Some(next) = next else { return "nothing".to_owned() };
        (level, found) = (&next["descriptors"], Some(next));
    }
    let limit = &found.unwrap()["rate_limit"];
    match (limit, limit["unlimited"] == Json::Bool(true), text(limit, "requests_per_unit").replace('_', "")) {
        (Json::Null, _, _) => "no limit".to_owned(),
        (_, true, _) => "unlimited".to_owned(),
        (_, _, count) if count.is_empty() => format!("0 {}", text(limit, "unit").to_uppercase()),
        (_, _, count) => format!("{count} {}", text(limit, "unit").to_uppercase()),
    }
}

/// The expected result, a lookup in the original file and a lookup after migration agree.
#[test]
fn migration_preserves_lookups() {
    let files = files("good");
    assert!(files.len() >= 7);
    for (name, yaml, beside) in files {
        let migrated = migrate(&[(&name, &yaml)]).unwrap_or_else(|errors| panic!("{errors}"));
        let config = config(&migrated);
        let [domain] = config.domains.as_slice() else { panic!("{migrated}") };
        let file: Json = serde_saphyr::from_str(&yaml).unwrap();
        assert_eq!(file["domain"], domain.name.as_str());
        for (entries, expected) in cases(&fs::read_to_string(beside).unwrap()) {
            let wanted: Vec<_> = entries.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            let found = domain.find(&wanted).map_or("nothing".to_owned(), |it| shown(&config, it.descriptor));
            assert_eq!(found, expected, "{name}: {entries:?}\n{migrated}");
            // YAML 1.1 and 1.2 disagree about numbers.
            if name != "spelling.yaml" {
                let looked_up = looked_up(&file, &entries);
                assert!(expected.starts_with(&looked_up), "{name}: {entries:?} {looked_up}");
            }
        }
    }
}

/// Nested descriptors down to a depth. No two of a level collide when key and value are joined.
fn descriptors(depth: u32) -> BoxedStrategy<Json> {
    let inner = match depth {
        0 => Just(Json::Null).boxed(),
        _ => descriptors(depth - 1),
    };
    let key = prop::sample::select(vec!["a", "b", "a_x", "no"]);
    let value = prop::sample::select(vec!["", "x", "xy", "x*", "*y", "*", "x*x", "1", "x_y"]);
    let unit = prop::sample::select(vec!["second", "Minute", "HOUR", "day", "week", "month", "year"]);
    let limit = prop_oneof![
        Just(Json::Null),
        Just(json!({ "unlimited": true })),
        (unit, 0_u32..9).prop_map(|(unit, count)| json!({ "unit": unit, "requests_per_unit": count })),
    ];
    let one = (key, value, limit, inner).prop_map(|(key, value, limit, inner)| {
        json!({ "key": key, "value": value, "rate_limit": limit, "descriptors": inner })
    });
    let level = prop::collection::vec(one, 0..6).prop_map(|all| {
        let mut seen = HashSet::new();
        let joined = |it: &Json| match (it["key"].as_str().unwrap(), it["value"].as_str().unwrap()) {
            (key, "") => key.to_owned(),
            (key, value) => format!("{key}_{value}"),
        };
        all.into_iter().filter(|it| seen.insert(joined(it))).collect()
    });
    level.boxed()
}

fn entries() -> impl Strategy<Value = Entries> {
    let key = prop::sample::select(vec!["a", "b", "a_x", "no"]);
    let value = prop::sample::select(vec!["", "x", "xy", "xx", "y", "xzy", "1", "x_y", "z"]);
    prop::collection::vec((key.prop_map(str::to_owned), value.prop_map(str::to_owned)), 1..4)
}

proptest! {
    #![proptest_config(testbed::property::cases(500))]

    /// The same for generated files.
    #[test]
    fn migration_preserves_lookups_of_generated_files(
        descriptors in descriptors(2),
        requests in prop::collection::vec(entries(), 20),
    ) {
        let file = json!({ "domain": "any", "descriptors": descriptors });
        let migrated = migrate(&[("any.yaml", &file.to_string())]).unwrap_or_else(|errors| panic!("{errors}"));
        let config = config(&migrated);
        for entries in requests {
            let wanted: Vec<_> = entries.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            let found = config.domains[0].find(&wanted);
            let found = found.map_or("nothing".to_owned(), |it| shown(&config, it.descriptor));
            prop_assert_eq!(found, looked_up(&file, &entries), "{:?} in\n{}", entries, migrated);
        }
    }
}

#[test]
fn migrated_file_is_readable() {
    let yaml = fs::read_to_string(format!("{FOLDER}/good/modes.yaml")).unwrap();
    let expected = r#"# detailed_metric and value_to_metric are omitted: metrics never contain values of entries.
domains:
  modes:
    - key: mode
      value: shadow
      fixed_window: { limit: 1, window: 1m, align: clock }
      shadow: true
    - key: mode
      value: quota
      fixed_window: { limit: 2, window: 1m, align: clock }
      name: quota
      quota: true
    - key: mode
      value: free
      unlimited: true
      name: free
      replaces: [quota, "odd, name"]
    - key: mode
      value: metrics
      fixed_window: { limit: 3, window: 1m, align: clock }
    - key: mode
      value: metadata
      fixed_window: { limit: 4, window: 1m, align: clock }
      metadata: { team: payments, level: 3, tags: [a, "1", true], nested: { half: 0.5, nothing: null }, "odd: name": "" }
    - key: mode
      value: none
    - key: mode
      value: empty
"#;
    assert_eq!(migrate(&[("modes.yaml", &yaml)]).unwrap(), expected);
}

#[test]
fn several_files_become_several_domains() {
    let all = files("good");
    let named: Vec<(&str, &str)> = all.iter().map(|(name, text, _)| (&**name, &**text)).collect();
    let migrated = migrate(&named).unwrap();
    let config = config(&migrated);
    assert_eq!((config.domains.len(), config.named_limits), (all.len(), 0));
    assert_eq!(migrate(&[]).unwrap(), "domains: {}\n");
}

fn message(files: &[(&str, &str)]) -> String {
    match migrate(files) {
        Ok(text) => format!("this was understood:\n{text}"),
        Err(errors) => errors.to_string(),
    }
}

/// To update the expected messages, run the tests with `RATEKEEPER_WRITE_GOLDEN=1` and review the difference.
#[test]
fn invalid_envoy_files_have_the_expected_messages() {
    let files = files("bad");
    assert!(files.len() >= 35);
    for (name, yaml, beside) in files {
        let message = message(&[(&name, &yaml)]) + "\n";
        if std::env::var_os("RATEKEEPER_WRITE_GOLDEN").is_some() {
            fs::write(&beside, &message).unwrap();
        }
        assert_eq!(message, fs::read_to_string(beside).unwrap(), "{name}");
    }
}

#[test]
fn duplicate_domain_is_rejected() {
    let message =
        message(&[("a.yaml", "domain: edge"), ("b.yaml", "domain: other"), ("c.yaml", "domain: edge\n")]);
    assert_eq!(
        message,
        "error: duplicate domain `edge`, already defined in a.yaml
  --> c.yaml:1:9
   |
 1 | domain: edge
   |         ^^^^
   = help: merge the two files, or rename one of the domains"
    );
}

#[test]
fn errors_of_all_files_are_reported() {
    let errors =
        migrate(&[("a.yaml", "domain: a\nx: 1"), ("b.yaml", "domain: b"), ("c.yaml", "y: 1")]).unwrap_err();
    let message: Vec<String> =
        errors.iter().map(|it| it.to_string().lines().take(2).collect::<Vec<_>>().join("")).collect();
    let expected = [
        "error: unknown field `x` in the file  --> a.yaml:2:1",
        "error: missing `domain`  --> c.yaml:1:1",
        "error: unknown field `y` in the file  --> c.yaml:1:1",
    ];
    assert_eq!(message.len(), expected.len(), "{message:?}");
    assert!(expected.iter().all(|line| message.iter().any(|it| it == line)), "{message:?}");
}

#[test]
fn exceeded_bounds_are_reported() {
    let half = |name: &str, more: &str| {
        let one = |n: usize| {
            format!("  - {{ key: k{n}, rate_limit: {{ unit: day, requests_per_unit: 1 }}{more} }}\n")
        };
        format!("domain: {name}\ndescriptors:\n{}", (0..DESCRIPTORS_MAX / 2).map(one).collect::<String>())
    };
    let (one, other) = (half("a", ""), half("b", ""));
    assert!(migrate(&[("a.yaml", &one), ("b.yaml", &other)]).is_ok());
    let first_lines = |files: &[(&str, &str)]| message(files).lines().take(2).collect::<String>();
    let more = other.clone() + "  - key: more\n";
    assert_eq!(
        first_lines(&[("a.yaml", &one), ("b.yaml", &more)]),
        "error: there are more than 2000 descriptors in all files     --> b.yaml:1003:5"
    );
    let metadata = ", metadata: { a: [1, 2, 3, 4, 5, 6], b: { c: d, e: f } }";
    let (one, other) = (half("a", metadata), half("b", metadata));
    assert_eq!(
        first_lines(&[("a.yaml", &one), ("b.yaml", &other)]),
        "error: all files together exceed the bounds of one configuration  --> a.yaml:1:1"
    );
    assert!(
        message(&[("a.yaml", &one), ("b.yaml", &other)])
            .ends_with("omit metadata, or run several servers with some of the domains each")
    );
}
