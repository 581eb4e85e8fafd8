//! The known name nearest to an unknown one, for error messages.

/// The choice that `word` most likely means: at most a third of its letters differ, ignoring case.
/// The first one of several equally near.
pub(crate) fn nearest<'a>(
    word: &str,
    choices: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let word = word.to_lowercase();
    let most = (word.chars().count() / 3).max(1);
    let distances = choices
        .into_iter()
        .map(|choice| (strsim::osa_distance(&word, &choice.to_lowercase()), choice));
    distances
        .filter(|(distance, _)| *distance <= most)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, choice)| choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_name_is_found_and_another_word_is_not() {
        let names = ["user", "ip", "header.x-api-key", "path"];
        for (word, expected) in [
            ("usr", Some("user")),
            ("User", Some("user")),
            ("headers.x-api-key", Some("header.x-api-key")),
            ("header.x_api_key", Some("header.x-api-key")),
            ("apth", Some("path")),
            ("customer", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, names), expected, "{word}");
        }
    }
}
