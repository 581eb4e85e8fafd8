use std::net::Ipv4Addr;

use super::super::text::KeyText;
use super::write::push_group;
use crate::http::Group;

#[test]
fn addresses_are_written_as_they_are_displayed() {
    for octet in 0..=255 {
        for v4 in [[octet, 255 - octet, octet / 2, octet / 7], [octet; 4]].map(Ipv4Addr::from) {
            let mut out = KeyText::new();
            push_group(Group::V4(v4), &mut out);
            assert_eq!(out.into_string(), format!("ip:{v4}"));
        }
    }
}
