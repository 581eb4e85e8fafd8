//! Addresses: what is read, what is refused with which words, and what is never shown.

use super::super::url::{Protocol, Servers};
use super::*;

#[test]
fn addresses_are_read_and_shown_without_credentials() {
    for (text, shown) in [
        ("redis://localhost", "redis://localhost:6379"),
        ("redis://localhost/", "redis://localhost:6379"),
        ("redis://10.0.0.1:7000/3", "redis://10.0.0.1:7000/3"),
        ("REDIS://h", "redis://h:6379"),
        ("valkey://h/0", "valkey://h:6379"),
        ("valkeys://h", "valkeys://h:6379"),
        ("rediss://user:pass@h:1/2", "rediss://***@h:1/2"),
        ("redis://:pass@h", "redis://***@h:6379"),
        ("redis://:@h", "redis://h:6379"),
        ("redis://u:p%40ss%3A%2F%3f@h", "redis://***@h:6379"),
        ("redis://u:p@ss/w:rd@h", "redis://***@h:6379"),
        ("redis://[::1]", "redis://[::1]:6379"),
        ("redis://[fe80::1]:7000/1", "redis://[fe80::1]:7000/1"),
        ("redis+unix:///run/redis.sock", "redis+unix:///run/redis.sock"),
        ("unix:///run/my%20redis.sock?db=2", "redis+unix:///run/my%20redis.sock?db=2"),
        ("unix:///run/a@b.sock?user=u&password=p%26q", "redis+unix:///run/a%40b.sock"),
        ("redis+sentinel://a,b:7,c/main", "redis+sentinel://a:26379,b:7,c:26379/main"),
        (
            "rediss+sentinel://u:p@a/my%2Fmain/4?sentinel_password=x",
            "rediss+sentinel://***@a:26379/my%2Fmain/4",
        ),
        ("redis+cluster://a,[::1]:7001,c", "redis+cluster://a:6379,[::1]:7001,c:6379"),
        ("valkey+cluster://:p@a", "valkey+cluster://***@a:6379"),
        ("redis://h/1?secret=0123456789abcdef", "redis://h:6379/1"),
        (
            "redis+cluster://a?secret=%26%3d%40%23-and-many-more&protocol=3",
            "redis+cluster://a:6379",
        ),
        ("unix:///s?secret=0123456789abcdef&db=2", "redis+unix:///s?db=2"),
        (
            "rediss://h?ca=/ca.pem&cert=/c.pem&key=/k.pem&insecure=false&protocol=2",
            "rediss://h:6379",
        ),
    ] {
        let url = parsed(text);
        assert_eq!(url.to_string(), shown, "{text}");
        assert_eq!(format!("{url:?}"), format!("RedisUrl({shown})"), "{text}");
        // What is shown is an address again, of the same servers.
        let again = parsed(&shown.replace("***@", ""));
        assert_eq!(again.to_string(), shown.replace("***@", ""), "{text}");
    }
}

#[test]
fn every_part_is_where_it_belongs() {
    let url = parsed("redis://us%65r:p%40ss%3A%2F%3f@h:1/2?protocol=3");
    assert_eq!(url.login.user.as_deref(), Some("user"));
    assert_eq!(url.login.password.as_deref(), Some("p@ss:/?"));
    assert_eq!((url.database, url.protocol), (2, Some(Protocol::Resp3)));
    assert!(url.tls.is_none());

    let url = parsed(
        "rediss+sentinel://u:p@a,b/svc/1?sentinel_user=su&sentinel_password=s%25p&ca=/x%20y&insecure=true",
    );
    let Servers::Sentinel { sentinels, service, login } = &url.servers else { panic!("{url:?}") };
    assert_eq!((sentinels.len(), service.as_str()), (2, "svc"));
    assert_eq!((login.user.as_deref(), login.password.as_deref()), (Some("su"), Some("s%p")));
    assert_eq!((url.login.user.as_deref(), url.database), (Some("u"), 1));
    let tls = url.tls.as_ref().unwrap();
    assert_eq!((tls.ca.as_deref(), tls.insecure), (Some("/x y".as_ref()), true));

    assert!(!url.has_secret());
    let url = parsed("redis+cluster://a,b?secret=p%26%25-0123456789ab");
    assert_eq!(url.secret().unwrap().checked().unwrap(), b"p&%-0123456789ab");

    let url = parsed("redis+unix:///s?db=5&user=u&pass=p");
    assert_eq!((url.login.user.as_deref(), url.login.password.as_deref()), (Some("u"), Some("p")));
    assert_eq!(url.database, 5);
}

#[test]
fn mistakes_are_named_with_what_was_expected() {
    for (text, message) in [
        (
            "localhost:6379",
            "store URL: no scheme: expected redis://HOST:PORT: write redis://localhost:6379",
        ),
        ("user:s3cret@h", "store URL: no scheme: expected redis://HOST:PORT"),
        ("s3cret", "store URL: no scheme: expected redis://HOST:PORT"),
        (
            "rediss:127.0.0.1",
            "store URL: no scheme: expected redis://HOST:PORT: write rediss://127.0.0.1",
        ),
        (
            "http://h",
            "store URL: scheme \"http\": expected redis, rediss, redis+unix, redis+sentinel, rediss+sentinel, redis+cluster or rediss+cluster, or the same with valkey",
        ),
        ("redis://", "store URL: host: expected a name or an address"),
        ("redis://h:70000", "store URL: port \"70000\": expected a number from 1 to 65535"),
        ("redis://h:0", "store URL: port \"0\": expected a number from 1 to 65535"),
        ("redis://h:+1", "store URL: port: expected a number from 1 to 65535"),
        ("redis://h/one", "store URL: database \"one\": expected a number"),
        ("redis://h/+1", "store URL: database \"+1\": expected a number"),
        (
            "redis://::1:6379",
            "store URL: host \"::1:6379\": expected an IPv6 address in brackets: [::1]:6379",
        ),
        (
            "redis://[::1",
            "store URL: host \"[::1\": expected a closing bracket after an IPv6 address: [::1]:6379",
        ),
        (
            "redis://[::1]6379",
            "store URL: host \"[::1]6379\": expected a colon and a port after the bracket, or nothing",
        ),
        ("redis://[h]", "store URL: host \"[h]\": expected an IPv6 address between the brackets"),
        (
            "redis://a,b",
            "store URL: host \"a,b\": expected one host; several are for redis+sentinel:// or redis+cluster://",
        ),
        (
            "redis://user@h",
            "store URL: password: expected one, because there is a user; write :password@ for a password alone",
        ),
        ("redis://h?protocol=4", "store URL: protocol \"4\": expected 2 or 3"),
        (
            "redis://h?ca=x",
            "store URL: option \"ca\": expected it only with TLS: rediss://, rediss+sentinel:// or rediss+cluster://",
        ),
        (
            "rediss://h?cert=x",
            "store URL: key: expected the file of the key, because there is a cert",
        ),
        (
            "rediss://h?key=x",
            "store URL: cert: expected the file of the certificate, because there is a key",
        ),
        ("rediss://h?insecure=yes", "store URL: insecure \"yes\": expected true or false"),
        (
            "redis://h?secret=short",
            "store URL: secret: expected 16 to 512 bytes at random, found 5",
        ),
        (
            "redis://h?secret=%zz",
            "store URL: secret: expected percent-encoded UTF-8: %XX with two hexadecimal digits",
        ),
        ("redis://h?protocol=2&protocol=3", "store URL: option \"protocol\": expected it once"),
        ("redis://h?protocol", "store URL: option \"protocol\": expected a value: name=value"),
        (
            "redis+sentinel://a,b",
            "store URL: service: expected its name after the hosts: redis+sentinel://host/service",
        ),
        ("redis+cluster://a,,b", "store URL: host: expected a name or an address"),
        (
            "redis+unix://relative",
            "store URL: path \"relative\": expected an absolute path: redis+unix:///path/to/socket",
        ),
        (
            "redis://:%zz@h",
            "store URL: password: expected percent-encoded UTF-8: %XX with two hexadecimal digits",
        ),
        (
            "redis://:%ff@h",
            "store URL: password: expected percent-encoded UTF-8: %XX with two hexadecimal digits",
        ),
    ] {
        assert_eq!(text.parse::<RedisUrl>().unwrap_err().to_string(), message, "{text}");
    }
}

#[test]
fn a_mistake_never_shows_a_password() {
    // Every way to get an address wrong around a password, its special characters not encoded, the
    // @ forgotten.
    let passwords = [
        "op3nup",
        "op3nup?",
        "op3nup#x",
        "op3/nup",
        "op3@nup",
        "op3:nup",
        "op3nup%",
        "op3nup%zz",
        "op3 nup",
        "op3,nup",
    ];
    let after = [
        "@h:bad",
        "@h:99999",
        "@[::1",
        "@h/x",
        "@",
        "",
        "@a,b",
        "@h?x=1",
        "@h?protocol=9",
        "@h?ca=1",
        "@h o",
    ];
    let before = ["user:", ":", "us er:", ""];
    let all = |scheme: &str, check: &dyn Fn(&str, &str, &str)| {
        for password in passwords {
            for start in before {
                after.iter().for_each(|end| {
                    check(&format!("{scheme}://{start}{password}{end}"), start, end)
                });
            }
        }
    };
    for scheme in ["redis", "rediss", "redis+sentinel", "redis+cluster", "http", "redis+x"] {
        all(scheme, &|text, start, end| match text.parse::<RedisUrl>() {
            // Without a colon it is a user or a host; without anything after it, a port or a
            // service.
            _ if start.is_empty() => {}
            Ok(_) if end.is_empty() => {}
            Ok(url) => assert!(!format!("{url} {url:?}").contains("nup"), "{text}"),
            Err(error) => assert!(!format!("{error} {error:?}").contains("nup"), "{text}: {error}"),
        });
    }
    // The same among the options, where an ampersand ends it; `sesame` is in no word of ours.
    for secret in [
        "sesame",
        "sesame-0123456789",
        "0123456789abcdef&sesame",
        "sesame%",
        "ses#sesame",
        "@sesame",
        "a=b&sesame=1",
    ] {
        for option in ["secret", "sentinel_password", "password", "pass"] {
            for scheme in [
                "redis://h",
                "redis+sentinel://h/s",
                "redis+cluster://h",
                "unix:///s",
                "rediss://h",
            ] {
                for more in ["", "&protocol=9", "&x=1", "&secret=short", "&ca=1"] {
                    let text = format!("{scheme}?{option}={secret}{more}");
                    let told = match text.parse::<RedisUrl>() {
                        Ok(url) => format!("{url} {url:?}"),
                        Err(error) => format!("{error} {error:?}"),
                    };
                    assert!(!told.contains("sesame"), "{text}: {told}");
                }
            }
        }
    }
}
