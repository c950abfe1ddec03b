//! Attempts to bypass a limit or to forge headers.

use std::fmt::Write as _;

use testbed::http::{get, header, read_head, read_response, send_raw, status};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::peers::{ConfigFile, TempDir, scripted};
use super::support::{Upstream, in_front_of, run};

/// Statuses of a request that is sent three times, where two are allowed.
async fn three_times(gateway: &super::support::TestGateway, headers: &str) -> [u16; 3] {
    let mut statuses = [0; 3];
    for status in &mut statuses {
        *status = testbed::http::status(&get(gateway.address, "/", headers).await);
    }
    statuses
}

/// The claims of Alice, valid for 75 years.
const TOKEN: &str = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiJhbGljZSIsImV4cCI6NDEwMjQ0NDgwMH0.\
    TmvL0cO62RctIm9e4IquISdR6FXO9mWzLVCoKAeDBCY";
const KEYS: &str =
    r#"{"keys":[{"kty":"oct","alg":"HS256","k":"YSBzZWNyZXQgb2YgYXQgbGVhc3QgMzIgYnl0ZXMsIGZvciB0ZXN0cw"}]}"#;

#[tokio::test]
async fn request_with_two_tokens_is_rejected() {
    let upstream = Upstream::start().await;
    let directory = TempDir::new();
    let keys = directory.write("jwks.json", KEYS);
    let jwt = format!("jwt: {{ keys: {{ file: '{keys}' }} }}");
    let limited = format!(
        "{jwt}\nlimits: {{ per-user: {{ key: {{ claim: sub, fallback: ip }}, fixed_window: {{ limit: 2, window: 1h }} }} }}"
    );
    let gateway = in_front_of(&upstream, &limited, "").await;
    let alice = format!("Authorization: Bearer {TOKEN}\r\n");
    assert_eq!(three_times(&gateway, &alice).await, [200, 200, 429]);
    for twice in
        [format!("{alice}Authorization: Bearer x\r\n"), format!("Authorization: Bearer x\r\n{alice}")]
    {
        assert_eq!(three_times(&gateway, &twice).await, [400; 3]);
    }
    assert_eq!(upstream.requests().len(), 2);

    // A route does not use either token.
    let gateway = in_front_of(&upstream, &jwt, ", claim: { sub: alice }").await;
    assert_eq!(status(&get(gateway.address, "/", &alice).await), 200);
    let twice = format!("{alice}Authorization: Bearer x\r\n");
    assert_eq!(status(&get(gateway.address, "/", &twice).await), 400);
}

/// A header that limits or routes read cannot be declared hop-by-hop, which would remove it.
#[tokio::test]
async fn headers_that_the_configuration_reads_cannot_be_hop_by_hop() {
    let upstream = Upstream::start().await;
    let limits = "limits:
  beta: { when: { header: { X-Beta: '1' } }, fixed_window: { limit: 2, window: 1h } }
  heavy: { cost: { header: X-Cost }, fixed_window: { limit: 1000, window: 1h } }
  tiers:
    fixed_window: { limit: 1000, window: 1h }
    overrides: [{ when: { header: { X-Tier: gold } }, unlimited: true }]
";
    let route = ", header: { X-Route: '1' }, request_headers: { set: { X-Tenant: acme } }";
    let gateway = in_front_of(&upstream, limits, route).await;
    let usual = "X-Beta: 1\r\nX-Route: 1\r\n";
    assert_eq!(three_times(&gateway, usual).await, [200, 200, 429]);
    for name in ["x-beta", "X-COST", "x-tier", "X-Route", "x-tenant", "x-request-id"] {
        let request = format!("GET / HTTP/1.1\r\nHost: a\r\nConnection: close, {name}\r\n{usual}\r\n");
        assert_eq!(status(&send_raw(gateway.address, request).await), 400, "{name}");
    }
    assert_eq!(upstream.requests().len(), 2);
}

/// Limits and routes may read hop-by-hop headers, for example `Upgrade`.
#[tokio::test]
async fn limits_can_read_hop_by_hop_headers() {
    let upstream = Upstream::start().await;
    let limits = "limits: { sockets: { when: { header: { Upgrade: websocket } }, fixed_window: { limit: 2, window: 1h } } }";
    let gateway = in_front_of(&upstream, limits, "").await;
    let request = "GET / HTTP/1.1\r\nHost: a\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n";
    for wanted in [200, 200, 429] {
        assert_eq!(status(&send_raw(gateway.address, request).await), wanted);
    }
}

#[tokio::test]
async fn limits_on_forwarding_headers_use_the_values_of_the_gateway() {
    let upstream = Upstream::start().await;
    for name in ["X-Forwarded-For", "X-Real-IP", "X-Forwarded-Host", "X-Forwarded-Proto"] {
        let limits = format!(
            "limits: {{ odd: {{ key: {{ header: {name} }}, fixed_window: {{ limit: 2, window: 1h }} }} }}"
        );
        let gateway = in_front_of(&upstream, &limits, "").await;
        let mut statuses = Vec::new();
        for number in 0..3 {
            let response = get(gateway.address, "/", &format!("{name}: 203.0.113.{number}\r\n")).await;
            statuses.push(status(&response));
        }
        assert_eq!(statuses, [200, 200, 429], "{name}");
    }
}

#[tokio::test]
async fn forged_forwarding_headers_and_aliases_are_removed() {
    let upstream = Upstream::start().await;
    let headers = "X-Forwarded-Prefix: /admin\r\nX-Forwarded-Ssl: on\r\nX-Forwarded-Server: bank\r\nX_Tenant: evil\r\n\
        X.Tenant: evil\r\nX_Request_Id: mine\r\nX_Forwarded_Prefix: /admin\r\nX!Tenant: evil\r\nX!Forwarded!For: 6.6.6.6\r\n\
        X+Real+IP: 6.6.6.6\r\nTransfer!Encoding: chunked\r\nContent~Length: 77\r\nProxy|Connection: x\r\n";
    let gateway = in_front_of(&upstream, "", ", request_headers: { set: { X-Tenant: acme } }").await;
    get(gateway.address, "/", headers).await;
    let seen = upstream.only_request();
    for name in [
        "x-forwarded-prefix",
        "x-forwarded-ssl",
        "x-forwarded-server",
        "x_tenant",
        "x.tenant",
        "x_request_id",
        "x_forwarded_prefix",
        "x!tenant",
        "x!forwarded!for",
        "x+real+ip",
        "transfer!encoding",
        "content~length",
        "proxy|connection",
    ] {
        assert_eq!(seen.header(name), None, "{name}");
    }
    assert_eq!(seen.header("x-tenant"), Some("acme"));
}

/// Upstreams that merge spellings of names would serve a client by one value while limits count another. Each request
/// has a new value in one spelling and the client's own in another; the upstream must never get both.
#[tokio::test]
async fn other_spellings_of_a_key_are_no_second_budget() {
    let upstream = Upstream::start().await;
    let gateway_for = async |key: &str| {
        let limits = format!(
            "limits: {{ per-user: {{ key: {{ {key} }}, fixed_window: {{ limit: 2, window: 1h }} }} }}"
        );
        in_front_of(&upstream, &limits, "").await
    };
    // The client's own value counts, whatever is appended to it and however its name is spelled.
    let gateway = gateway_for("query: api_key").await;
    let mut statuses = Vec::new();
    for target in ["/?api_key=VALID;n=1", "/?api.key=VALID", "/?api%5Bkey=VALID%C2%A0", "/?x=1;api-key=VALID"]
    {
        statuses.push(status(&get(gateway.address, target, "").await));
    }
    assert_eq!(statuses, [200, 200, 429, 429]);
    for number in 0..3 {
        for target in
            [format!("/?api_key=R{number}&api.key=VALID"), format!("/?api_key=R{number};api_key=VALID")]
        {
            assert_eq!(status(&get(gateway.address, &target, "").await), 400, "{target}");
        }
    }
    for target in ["/?[api_key]=VALID", "/?api_key]=VALID"] {
        assert_eq!(status(&get(gateway.address, target, "").await), 429, "{target}");
    }
    assert_eq!(status(&get(gateway.address, "/?api_key=VALID%00x", "").await), 400);
    let gateway = gateway_for("cookie: session_id").await;
    for cookies in [
        "session.id=VALID; session_id=R1",
        "session_id=VALID n=1",
        "session_id=VALID,n=1",
        "session_id=R1,session_id=VALID",
        "n=1, session_id=VALID",
        "session_id=\"VALID\"x1",
    ] {
        let headers = format!("Cookie: {cookies}\r\n");
        assert_eq!(status(&get(gateway.address, "/", &headers).await), 400, "{cookies}");
    }
    let gateway = gateway_for("header: Authorization").await;
    assert_eq!(three_times(&gateway, "Authorization: Basic VkFMSUQ6cA==\r\n").await, [200, 200, 429]);
    for credentials in ["VkFMSUQ6cA", "VkFMSUQ6cB==", "VkFM*SUQ6cA=="] {
        let headers = format!("Authorization: Basic {credentials}\r\n");
        assert_eq!(status(&get(gateway.address, "/", &headers).await), 400, "{credentials}");
    }
    let before = upstream.requests().len();
    for (key, own, other) in [
        ("header: X_Api_Key", "X_Api_Key", "X-Api-Key"),
        ("header: X-Api-Key", "X-Api-Key", "X_Api.Key"),
        ("header: X-Api-Key", "X-Api-Key", "X!Api+Key"),
    ] {
        let gateway = gateway_for(key).await;
        let headers = format!("{own}: R1\r\n{other}: VALID\r\n");
        assert_eq!(three_times(&gateway, &headers).await, [200, 200, 429], "{key}");
        for value in ["R1\u{a0}", "\u{85}R1", "R1\u{3000}"] {
            assert_eq!(status(&get(gateway.address, "/", &format!("{own}: {value}\r\n")).await), 429);
        }
    }
    for seen in &upstream.requests()[before..] {
        assert!(!format!("{seen:?}").contains("VALID"), "{seen:?}");
    }
}

/// Limits on both spellings read one header: an upstream that merges them sees one, too.
#[tokio::test]
async fn two_configured_spellings_of_a_header_are_one_header() {
    let upstream = Upstream::start().await;
    let limits = "limits:
  hyphens:
    { when: { path: /h }, key: { header: X-Api-Key, fallback: { literal: none } }, fixed_window: { limit: 2, window: 1h } }
  underscores:
    { when: { path: /u }, key: { header: X_Api_Key, fallback: { literal: none } }, fixed_window: { limit: 2, window: 1h } }
";
    let gateway = in_front_of(&upstream, limits, "").await;
    for path in ["/h", "/u"] {
        let mut statuses = Vec::new();
        for headers in
            ["X-Api-Key: VALID\r\n", "X_Api_Key: VALID\r\n", "X_Api_Key: VALID\r\n", "X-Api-Key: VALID\r\n"]
        {
            statuses.push(status(&get(gateway.address, path, headers).await));
        }
        assert_eq!(statuses, [200, 200, 429, 429], "{path}");
        for both in ["X-Api-Key: R1\r\nX_Api_Key: VALID\r\n", "X_Api_Key: R1\r\nX-Api-Key: VALID\r\n"] {
            assert_eq!(status(&get(gateway.address, path, both).await), 400, "{path}: {both}");
        }
    }
    assert_eq!(upstream.requests().len(), 4);
}

/// A route must not forward a client's value of a header that it sets, in whichever spelling a limit reads it.
#[tokio::test]
async fn limit_on_another_spelling_does_not_let_a_set_header_be_forged() {
    let upstream = Upstream::start().await;
    let limits =
        "limits: { per-tenant: { key: { header: X_Tenant }, fixed_window: { limit: 100, window: 1h } } }";
    let edits = ", request_headers: { set: { X-Tenant: acme }, remove: [X-Internal] }";
    let gateway = in_front_of(&upstream, limits, edits).await;
    let headers = "X_Tenant: evil\r\nX_Internal: evil\r\nX-Internal: evil\r\n";
    assert_eq!(status(&get(gateway.address, "/", headers).await), 200);
    let seen = upstream.only_request();
    assert_eq!(seen.header("x-tenant"), Some("acme"));
    assert!(!format!("{seen:?}").contains("evil"), "{seen:?}");
}

/// Some servers ignore white space and dots at the end of a segment, and decode `%3B` before they drop parameters.
#[tokio::test]
async fn ignored_ends_of_segments_do_not_bypass_path_limits() {
    let upstream = Upstream::start().await;
    let limits = "limits: { login: { when: { path: /login }, fixed_window: { limit: 1, window: 1h } } }";
    let gateway = in_front_of(&upstream, limits, "").await;
    assert_eq!(status(&get(gateway.address, "/login", "").await), 200);
    assert_eq!(status(&get(gateway.address, "/login", "").await), 429);
    for path in [
        "/login%20",
        "/login%09",
        "/login.",
        "/login%3bx",
        "/login.%3B",
        "/login..%20/",
        "/x/..%3b/login",
        "/x/..%20/login",
    ] {
        let response = get(gateway.address, path, "").await;
        assert_eq!(status(&response), 400, "{path}: {response}");
    }
    assert_eq!(upstream.requests().len(), 1);
    // Forwarded as sent, because no limit and no route would apply differently.
    for path in ["/file.", "/a%20b", "/a%20", "/v1./x%3By", "/login%20x", "/x/...", "/x/..b"] {
        assert_eq!(status(&get(gateway.address, path, "").await), 200, "{path}");
        assert_eq!(upstream.requests().last().map(|seen| seen.uri.path().to_owned()).as_deref(), Some(path));
    }
    let gateway = in_front_of(&upstream, "", ", path: /admin/**").await;
    assert_eq!(status(&get(gateway.address, "/admin/a.", "").await), 200);
    assert_eq!(status(&get(gateway.address, "/admin.", "").await), 400);
}

/// A host that servers read as another one, or as none, is no way around a limit on a host.
#[tokio::test]
async fn limits_on_hosts_apply_to_every_accepted_form_of_the_host() {
    let upstream = Upstream::start().await;
    let limits = "limits:
  a: { when: { host: a.test }, fixed_window: { limit: 1, window: 1h } }
  others: { key: host, when: { path: /others }, fixed_window: { limit: 1, window: 1h } }
";
    let gateway = in_front_of(&upstream, limits, "").await;
    let request = |host: &str, path: &str, version: &str| {
        format!("GET {path} HTTP/{version}\r\n{host}Connection: close\r\n\r\n")
    };
    for (host, wanted) in [
        ("Host: a.test\r\n", 200),
        ("Host: A.test.:80\r\n", 429),
        ("Host: a.test..\r\n", 400),
        ("Host: a.test,\r\n", 400),
        ("Host: a.test, b\r\n", 400),
        ("Host: .a.test\r\n", 400),
    ] {
        assert_eq!(status(&send_raw(gateway.address, request(host, "/", "1.1")).await), wanted, "{host}");
    }
    // HTTP/1.0 without a host has an empty host: conditions on hosts do not fit, and the fallback of the key applies.
    for wanted in [200, 429] {
        assert_eq!(status(&send_raw(gateway.address, request("", "/others", "1.0")).await), wanted);
    }
    assert_eq!(status(&send_raw(gateway.address, request("Host: b\r\n", "/others", "1.0")).await), 200);
}

/// A proxy writes one of the two headers and forwards the client's value of the other.
#[tokio::test]
async fn only_the_configured_forwarding_header_of_a_trusted_proxy_counts() {
    let upstream = Upstream::start().await;
    let gateway = in_front_of(&upstream, "client: { trusted_proxies: [127.0.0.0/8] }", "").await;
    get(gateway.address, "/", "X-Forwarded-For: 203.0.113.7\r\nForwarded: for=6.6.6.6;host=evil\r\n").await;
    let seen = upstream.only_request();
    assert_eq!(seen.header("forwarded"), None);
    assert_eq!(seen.header("x-forwarded-for"), Some("203.0.113.7, 127.0.0.1"));

    let upstream = Upstream::start().await;
    let trust = "client: { trusted_proxies: [127.0.0.0/8], source: forwarded }";
    let gateway = in_front_of(&upstream, trust, "").await;
    get(gateway.address, "/", "X-Forwarded-For: 6.6.6.6\r\nForwarded: for=203.0.113.7\r\n").await;
    let seen = upstream.only_request();
    assert_eq!(seen.header("forwarded"), Some("for=203.0.113.7, for=127.0.0.1;proto=http"));
    assert_eq!(seen.header("x-forwarded-for"), Some("203.0.113.7, 127.0.0.1"));
    assert_eq!(seen.header("x-real-ip"), Some("203.0.113.7"));
}

/// Requests over HTTP/2 in a tunnel would not be limited.
#[tokio::test]
async fn upgrade_to_http2_is_not_forwarded() {
    let address = scripted(|mut stream, _| async move {
        let head = read_head(&mut stream).await;
        let agreed = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n";
        let plain = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
        let wants = header(&head, "upgrade").is_some();
        let _ = stream.write_all(if wants { agreed } else { plain }.as_bytes()).await;
    })
    .await;
    let gateway = run(&ConfigFile::default().to(&[address])).await;
    for (wanted, response) in [
        ("Upgrade: h2c\r\n", 200),
        ("Upgrade: websocket, h2c\r\n", 200),
        ("Upgrade: websocket\r\nUpgrade: H2C\r\n", 200),
        // The upstream switches to a protocol that the client did not offer.
        ("Upgrade: websocket\r\n", 502),
    ] {
        let mut stream = TcpStream::connect(gateway.address).await.unwrap();
        let request = format!("GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\n{wanted}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        assert_eq!(status(&read_response(&mut stream).await), response, "{wanted}");
    }
}

/// Trailers cannot override headers that limits and routes have evaluated.
#[tokio::test]
async fn trailers_cannot_override_evaluated_headers() {
    let address = scripted(|mut stream, _| async move {
        let mut got = read_head(&mut stream).await;
        while !got.ends_with("0\r\n\r\n") && !got.contains("x-checksum: 7\r\n\r\n") {
            let line = read_head(&mut stream).await;
            if line.is_empty() {
                break;
            }
            got += &line;
        }
        let mut response = "HTTP/1.1 200 OK\r\nConnection: close\r\n".to_owned();
        let _ = write!(response, "Content-Length: {}\r\n\r\n{got}", got.len());
        let _ = stream.write_all(response.as_bytes()).await;
    })
    .await;
    let limits = "limits: { per-user: { key: { header: X-User-Id }, token_bucket: { capacity: 1000 } } }";
    let gateway = run(&ConfigFile { limits, ..ConfigFile::default() }.to(&[address])).await;
    let request = "POST / HTTP/1.1\r\nHost: a\r\nX-User-Id: alice\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\
        Trailer: X-Checksum, X-User-Id, X-Forwarded-For, Authorization, X_User_Id, X_Forwarded_For, Content_Length, x!user!id\r\n\r\n\
        3\r\nabc\r\n0\r\nX-Checksum: 7\r\nX-User-Id: bob\r\nX-Forwarded-For: 6.6.6.6\r\nAuthorization: x\r\n\
        X_User_Id: bob\r\nX_Forwarded_For: 6.6.6.6\r\nContent_Length: 9\r\nx!user!id: bob\r\n\r\n";
    let response = send_raw(gateway.address, request).await.to_lowercase();
    let (_, body) = response.split_once("\r\n\r\n").unwrap();
    let (_, trailers) = body.split_once("abc").unwrap();
    assert!(trailers.contains("x-checksum: 7"), "{response}");
    for sent in ["bob", "6.6.6.6", "authorization: x", "content_length: 9"] {
        assert!(!trailers.contains(sent), "{response}");
    }
}

#[tokio::test]
async fn asterisk_target_is_allowed_only_for_options() {
    let upstream = Upstream::start().await;
    let gateway = run(&ConfigFile::default().to_urls(&[format!("http://{}/v1", upstream.address)])).await;
    assert_eq!(status(&get(gateway.address, "*", "").await), 400);
    let options = "OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
    assert_eq!(status(&send_raw(gateway.address, options).await), 200);
    assert_eq!(upstream.only_request().uri.path(), "*");
    let trace = send_raw(gateway.address, "TRACE / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    assert!(header(&trace, "allow").is_some_and(|allowed| allowed.starts_with("GET, ")), "{trace}");
}
