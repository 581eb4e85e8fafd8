//! Comparisons of conditions: which imply or exclude each other.

use super::Condition;

/// Whether every request that matches `narrow` also matches `wide`. False where that is not
/// certain.
pub(crate) fn covers(wide: &[Condition], narrow: &[Condition]) -> bool {
    wide.iter().all(|own| {
        let mut others = narrow.iter().filter(|other| other.attribute == own.attribute);
        others.any(|other| {
            other.any_of.iter().all(|pattern| own.any_of.iter().any(|wide| wide.covers(pattern)))
        })
    })
}

/// Whether no value can match both. False where that is not certain.
pub(crate) fn excludes(one: &Condition, other: &Condition) -> bool {
    one.attribute == other.attribute
        && one.any_of.iter().all(|own| other.any_of.iter().all(|pattern| own.excludes(pattern)))
}

#[cfg(test)]
mod tests {
    use super::super::Pattern;
    use super::*;

    fn conditions(text: &str) -> Vec<Condition> {
        let pairs = text.split_whitespace().map(|pair| pair.split_once('=').unwrap());
        let condition = |(attribute, any_of): (&str, &str)| Condition {
            attribute: attribute.into(),
            any_of: any_of.split('|').map(|text| text.parse::<Pattern>().unwrap()).collect(),
        };
        pairs.map(condition).collect()
    }

    #[test]
    fn what_is_wider_is_known_where_it_is_certain() {
        for (wide, narrow, expected) in [
            ("", "path=/a", true),
            ("path=/a", "", false),
            ("path=/a", "path=/a", true),
            ("path=/a/*", "path=/a/b", true),
            ("path=/a/*", "path=/a/b/*", true),
            ("path=/a/b/*", "path=/a/*", false),
            ("path=*", "path=!/x", true),
            ("user=a|b", "user=b", true),
            ("user=b", "user=a|b", false),
            ("ip=10.0.0.0/8", "ip=10.1.0.0/16", true),
            ("ip=10.0.0.0/8", "ip=10.1.2.3", true),
            ("ip=10.1.0.0/16", "ip=10.0.0.0/8", false),
            ("ip=10.0.0.0/16", "ip=10.0.0.0/8", false),
            ("ip=10.0.0.0/8", "ip=192.168.0.0/16", false),
            ("path=**", "path=/a?", true),
            ("path=/a*b*", "path=/a*bc?", true),
            ("path=/a*b*", "path=/a*c*", false),
            ("path=/?*", "path=/?", true),
            ("user=!a", "user=!a*", true),
            ("user=!a*", "user=!a", false),
            ("user=!a", "user=b", true),
            ("user=!a", "user=a", false),
            ("user=!a*", "user=b*", true),
            ("user=a ip=10.0.0.0/8", "user=a", false),
            ("user=a", "user=a ip=10.0.0.0/8", true),
        ] {
            assert_eq!(
                covers(&conditions(wide), &conditions(narrow)),
                expected,
                "{wide} covers {narrow}"
            );
        }
        for (one, other, expected) in [
            ("path=/a", "path=/b", true),
            ("path=/a", "user=/b", false),
            ("path=/a/*", "path=/b/*", true),
            ("path=/a/*", "path=/a/b", false),
            ("path=/a*", "path=/a/b*", false),
            ("path=/a|/b", "path=/b", false),
            ("path=!/a", "path=/a", true),
            ("path=!/a*", "path=/a/*", true),
            ("path=/a/*", "path=!/a*", true),
            ("path=!/a", "path=!/b", false),
            ("path=/a", "path=/b*", true),
            ("path=/a", "path=/a*", false),
            ("path=a*c?", "path=a?b*", false),
            ("ip=10.0.0.0/8", "ip=192.0.2.0/24", true),
            ("ip=10.0.0.0/8", "ip=10.2.0.0/16", false),
        ] {
            assert_eq!(
                excludes(&conditions(one)[0], &conditions(other)[0]),
                expected,
                "{one} excludes {other}"
            );
        }
    }

    proptest::proptest! {
        /// A wider pattern matches all values of the narrower one, and patterns that exclude each
        /// other match no common value.
        #[test]
        fn what_is_said_holds_of_values(one in "!?[ab*?]{1,4}", other in "!?[ab*?]{1,4}", value in "[ab]{0,5}") {
            let (one, other): (Pattern, Pattern) = (one.parse().unwrap(), other.parse().unwrap());
            proptest::prop_assert!(!(one.covers(&other) && other.matches(&value)) || one.matches(&value));
            proptest::prop_assert!(!(one.excludes(&other) && other.matches(&value) && one.matches(&value)));
        }
    }
}
