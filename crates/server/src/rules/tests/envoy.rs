//! Files of envoyproxy/ratelimit: what they may say, how folders are read, and what is reported
//! about them.

use tidegate::Period;
use tidegate::store::MAX_KEY_BYTES;

use crate::findings::{ConfigError, MAX_FILE_BYTES};
use crate::rules::envoy::{Domains, MAX_DEPTH, MAX_FILES, Unit, files, override_key};

#[test]
fn units_are_known_by_number_and_by_word() {
    for (number, word) in (1..).zip(["second", "minute", "hour", "day", "month", "year", "week"]) {
        let unit = Unit::from_number(number).unwrap();
        for word in [word.to_string(), word.to_uppercase()] {
            let mut domains = Domains::default();
            let text = format!(
                "domain: a\ndescriptors: [{{ key: k, rate_limit: {{ unit: {word}, requests_per_unit: 3 }} }}]\n"
            );
            domains.add(&text, "f").unwrap();
            let found = domains.find("a", &[("k", "v")], 1).unwrap();
            assert_eq!(found.limited.stated, Some((3, unit)), "{word}");
            assert_eq!(found.charge.budget, unit.budget(3), "{word}");
        }
    }
    assert_eq!((Unit::from_number(0), Unit::from_number(8)), (None, None));
    assert_eq!((Unit::Month.period(), Unit::Year.period()), (Period::days(30), Period::days(365)));
}

#[test]
fn an_exact_value_counts_before_a_wildcard_and_an_empty_one_is_none() {
    let mut domains = Domains::default();
    let text = "\
domain: a
descriptors:
  - { key: path, value: /api/*, rate_limit: { unit: day, requests_per_unit: 1 } }
  - { key: path, value: /api/x, rate_limit: { unit: day, requests_per_unit: 2 } }
  - { key: user, value: '', rate_limit: { unit: day, requests_per_unit: 3 } }
";
    domains.add(text, "f").unwrap();
    let name =
        |key, value| domains.find("a", &[(key, value)], 1).unwrap().limited.rule.name.to_string();
    assert_eq!(name("path", "/api/x"), "a.path_/api/x");
    assert_eq!(name("path", "/api/y"), "a.path_/api/*");
    assert_eq!(name("user", "ann"), "a.user");
}

#[test]
fn domains_are_listed_with_an_example_that_has_a_limit() {
    let mut domains = Domains::default();
    domains.add("domain: edge\ndescriptors: [{ key: k, value: v }, { key: database, value: users }, { key: database, rate_limit: { unlimited: true } }]\n", "f").unwrap();
    let text = "domain: deep\ndescriptors: [{ key: a, descriptors: [{ key: b, value: c, rate_limit: { unlimited: true } }] }]";
    domains.add(text, "g").unwrap();
    domains.add("domain: bare\ndescriptors: [{ key: a, value: b }]\n", "h").unwrap();
    assert_eq!(domains.names(), ["bare", "deep", "edge"]);
    assert!(domains.contains("deep") && !domains.contains("depp"));
    assert_eq!(domains.example("edge"), Some(vec![("database", "a")]));
    assert_eq!(domains.example("deep"), Some(vec![("a", "a"), ("b", "c")]));
    assert_eq!((domains.example("bare"), domains.example("none")), (None, None));
}

#[test]
fn no_two_lists_of_entries_make_the_same_key() {
    let key =
        |entries: &[(&'static str, &'static str)]| override_key("edge", entries.iter().copied());
    assert_eq!(key(&[("a", "b"), ("cd", "")]), b"4:edge1:a1:b2:cd0:");
    assert_ne!(key(&[("a", "b1:c")]), key(&[("a", "b"), ("c", "")]));
    let long: &'static str = "x".repeat(MAX_KEY_BYTES).leak();
    assert_eq!(key(&[("a", long)]).len(), "sha1:".len() + 40);
    // As long as a key may be: `4:edge`, `1:a`, and a length of four digits.
    let just = &long[..MAX_KEY_BYTES - 14];
    assert!(key(&[("a", just)]).starts_with(b"4:edge1:a"));
}

#[test]
fn descriptors_are_nested_up_to_a_depth() {
    let nested = |depth| {
        let level = |number: usize| {
            let indent = "    ".repeat(number);
            format!("{indent}descriptors:\n{indent}  - key: k\n")
        };
        Domains::default()
            .add(&format!("domain: a\n{}", (0..depth).map(level).collect::<String>()), "f")
    };
    nested(MAX_DEPTH).unwrap();
    let error = nested(MAX_DEPTH + 1).unwrap_err().to_string();
    assert!(error.contains("are nested more than 30 deep"), "{error}");
    let error = nested(100).unwrap_err().to_string();
    assert!(
        error.ends_with("more than 64 lists and maps within one another: expected fewer"),
        "{error}"
    );
}

#[test]
fn a_folder_is_read_file_by_file() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let load = || Domains::load(folder.path());
    let warnings =
        load().unwrap().warnings().iter().map(|one| one.message.clone()).collect::<Vec<_>>();
    assert_eq!(warnings, ["no *.yaml files in the folder: nothing is configured"]);
    write("a.yaml", "domain: a\ndescriptors: [{ key: k }]\n");
    write("b.yml", "domain: b\ndescriptors: [{ key: k }]\n");
    write("c.txt", "domain: c\n");
    write("yaml", "domain: d\n");
    let domains = load().unwrap();
    assert_eq!((domains.names(), domains.warnings()), (vec!["a", "b"], &[][..]));
    assert_eq!(
        files(folder.path()).unwrap(),
        [folder.path().join("a.yaml"), folder.path().join("b.yml")]
    );
    // As large as a file may be, and a byte more.
    let large =
        format!("domain: a\n{}\n", "#".repeat(usize::try_from(MAX_FILE_BYTES).unwrap() - 11));
    write("a.yaml", &large);
    assert_eq!(load().unwrap().names(), ["a", "b"]);
    write("a.yaml", &format!("{large}#"));
    assert!(
        matches!(load(), Err(ConfigError::TooLarge { bytes, .. }) if bytes == MAX_FILE_BYTES + 1)
    );
}

#[test]
fn a_folder_has_an_end() {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..=MAX_FILES {
        if number == MAX_FILES {
            assert_eq!(Domains::load(folder.path()).unwrap().names().len(), MAX_FILES);
        }
        std::fs::write(
            folder.path().join(format!("{number}.yaml")),
            format!("domain: d{number}\n"),
        )
        .unwrap();
    }
    let error = Domains::load(folder.path()).unwrap_err().to_string();
    assert!(error.ends_with(" 1001 files: expected at most 1000"), "{error}");
}

/// What works, but is hardly meant.
#[test]
fn what_is_hardly_meant_is_reported() {
    let limit = "rate_limit: { unit: day, requests_per_unit: 1 }";
    for (descriptors, expected) in [
        (String::new(), &["domain \"a\" has no descriptors, so it limits nothing: add some, or remove the file"][..]),
        (format!("{{ key: path, value: /api/*, {limit} }}, {{ key: path, {limit} }}"), &[]),
        (
            format!("{{ key: path, value: '^/v1/.*$', {limit} }}"),
            &["a.path: value \"^/v1/.*$\" looks like a regular expression: expected a value, in which * is any number of characters: write \"/v1/*\""],
        ),
        // Only in paths does this look like one.
        (format!("{{ key: path, value: '/a|/b', {limit} }}"), &["write a descriptor for each value"]),
        (format!("{{ key: user, value: 'a|b', {limit} }}"), &[]),
        // A single character has no sign here.
        (format!("{{ key: user, value: 'u\\d+', {limit} }}"), &["write a descriptor for each value"]),
        (format!("{{ key: user, value: '^a(b|c)$', {limit} }}"), &["write a descriptor for each value"]),
        (
            format!("{{ key: path, value: /a/*, {limit} }}, {{ key: path, value: /a/b*, {limit} }}"),
            &["a.path: value \"/a/b*\" is never reached: \"/a/*\" above it matches first; put the narrower one first"],
        ),
        (format!("{{ key: path, value: /a/b*, {limit} }}, {{ key: path, value: /a/*, {limit} }}"), &[]),
        (format!("{{ key: path, value: /a/*, {limit} }}, {{ key: other, value: /a/b*, {limit} }}"), &[]),
        (format!("{{ key: path, value: '', {limit} }}"), &[]),
        (
            "{ key: b, rate_limit: { unit: day, requests_per_unit: 1, name: big } }, { key: c, descriptors: [{ key: d, \
             rate_limit: { unit: day, requests_per_unit: 1, name: deep, replaces: [{ name: bigg }, { name: none }, { name: big }] } }] }, \
             { key: e, rate_limit: { unit: day, requests_per_unit: 1, replaces: [{ name: deep }] } }"
                .into(),
            &[
                "a.c.d: replaces \"bigg\", which is the name of no rate_limit: did you mean big?",
                "a.c.d: replaces \"none\", which is the name of no rate_limit: expected the name of another rate_limit of this file",
            ],
        ),
    ] {
        let mut domains = Domains::default();
        domains.add(&format!("domain: a\ndescriptors: [{descriptors}]\n"), "f").unwrap();
        let found: Vec<&str> = domains.warnings().iter().map(|one| &*one.message).collect();
        let is_as_expected = found.len() == expected.len();
        assert!(
            is_as_expected && found.iter().zip(expected).all(|(found, expected)| found.ends_with(expected)),
            "{descriptors}: {found:?}"
        );
    }
}
