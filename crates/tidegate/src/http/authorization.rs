//! The `Authorization` header.

/// The token of an `Authorization` header with the scheme `Bearer`, in any case, without white
/// space around it.
///
/// ```
/// use tidegate::http::bearer_token;
/// assert_eq!(bearer_token(b"Bearer sesame"), Some(&b"sesame"[..]));
/// assert_eq!(bearer_token(b"Basic c2VzYW1l"), None);
/// ```
pub fn bearer_token(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    let token = token.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !token.is_empty()).then_some(token)
}
