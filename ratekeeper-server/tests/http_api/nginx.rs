//! A real nginx with the documented configuration, which requests a decision about each request.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use testbed::process::{Folder, Running, free_port};

use super::support::{get, run};

/// The module documentation, which contains the nginx configuration.
const MODULE_DOCS: &str = include_str!("../../src/http_api/authorize.rs");

/// The documented configuration, with the addresses of this test. The application answers `/forbidden` with a 403.
fn configuration(port: u16, api: SocketAddr, application: u16) -> String {
    let lines = MODULE_DOCS.split("```nginx").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let lines: Vec<&str> = lines.lines().map(|line| line.trim_start_matches("//!")).collect();
    let documented = lines.join("\n");
    assert!(documented.contains("127.0.0.1:9181") && documented.contains("http://application"));
    let documented = documented.replace("127.0.0.1:9181", &api.to_string());
    format!(
        "daemon off; worker_processes 1; pid nginx.pid; error_log error.log warn;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
  upstream application {{ server 127.0.0.1:{application}; }}
  server {{ listen 127.0.0.1:{application};
    location / {{ return 200 hello; }}
    location /forbidden {{ return 403; }}
  }}
  server {{ listen 127.0.0.1:{port};
{documented}
  }}
}}"
    )
}

/// A running nginx.
struct Nginx {
    folder: Folder,
    _running: Running,
    address: SocketAddr,
}

impl Nginx {
    fn start(api: SocketAddr) -> Nginx {
        let (port, application) = (free_port().unwrap(), free_port().unwrap());
        let folder = Folder::new().unwrap();
        folder.write("nginx.conf", &configuration(port, api, application)).unwrap();
        let prefix = folder.path().to_str().unwrap();
        // Debian installs servers outside the path of ordinary users.
        let path = format!("PATH={}:/usr/sbin", std::env::var("PATH").unwrap_or_default());
        let arguments = [&path, "nginx", "-p", prefix, "-c", "nginx.conf"];
        let running = Running::start(&folder, "nginx", Path::new("env"), &arguments, port).unwrap();
        Nginx { folder, _running: running, address: (Ipv4Addr::LOCALHOST, port).into() }
    }

    fn logs(&self) -> String {
        let read = |name| fs::read_to_string(self.folder.path().join(name)).unwrap_or_default();
        format!("{}{}", read("nginx.log"), read("error.log"))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nginx_enforces_the_limits() {
    let api = run("limits:
  per-user: { key: { header: X-User-Id, fallback: anonymous }, fixed_window: { limit: 2, window: 1h, align: first_request } }
  login: { key: ip, when: { path: /login, method: POST }, fixed_window: { limit: 1, window: 1h, align: first_request } }");
    let nginx = Nginx::start(api.address);
    let alice = "X-User-Id: alice\r\n";
    for remaining in [1, 0] {
        let response = get(nginx.address, "GET", "/?a=b", alice).await;
        assert_eq!((response.status, response.body.as_str()), (200, "hello"), "{}", nginx.logs());
        assert!(response.header("ratelimit").unwrap().contains(&format!("r={remaining}")), "{response:?}");
        assert!(response.header("ratelimit-policy").unwrap().contains("per-user"), "{response:?}");
        assert_eq!(response.header("retry-after"), None);
    }
    let response = get(nginx.address, "GET", "/", alice).await;
    assert_eq!(response.status, 429, "{response:?} {}", nginx.logs());
    assert_eq!(response.header("retry-after"), Some("3600"));
    assert!(response.header("ratelimit").unwrap().contains("r=0"), "{response:?}");

    // Headers from a client do not replace those that nginx sets.
    let forged = "X-User-Id: bob\r\nX-Original-URI: /cheap\r\nX-Original-Method: GET\r\nX-Forwarded-Uri: /cheap\r\nX-Original-URL: http://a/b\r\n";
    let posted = |path: &str, headers: &str| {
        let (address, path) = (nginx.address, path.to_owned());
        let headers = format!("{headers}Content-Length: 0\r\n");
        async move { get(address, "POST", &path, &headers).await.status }
    };
    assert_eq!(posted("/login", forged).await, 200, "{}", nginx.logs());
    assert_eq!(posted("/x/../login", &forged.replace("bob", "carol")).await, 429, "{}", nginx.logs());

    // A 403 of the application is passed on unchanged.
    assert_eq!(get(nginx.address, "GET", "/forbidden", "X-User-Id: dave\r\n").await.status, 403);
    assert_eq!(
        get(nginx.address, "GET", "/_limit", "X-User-Id: dave\r\n").await.status,
        404,
        "the location is internal"
    );
}
