//! The peers, configured as their manuals recommend: keep-alive on both sides, no logs, and as many workers as the
//! gateway. All set forwarding headers for the upstream, because the gateway does.

use std::error::Error;
use std::path::Path;

use testbed::process::{Folder, Running, free_port};

use super::needs::Programs;
use super::{Proxy, workers};

pub(super) const NGINX: &str = "nginx";
pub(super) const NGINX_BARE: &str = "nginx, no forwarded headers";
const HAPROXY: &str = "HAProxy";
const ENVOY: &str = "Envoy";

/// Starts the upstream of all contenders: a minimal server.
pub(super) fn upstream(folder: &Folder) -> Result<(Running, u16), Box<dyn Error>> {
    let port = free_port()?;
    let server = format!(
        "server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ return 200 \"hello\\n\"; }} }}"
    );
    Ok((nginx(folder, "upstream", 1, &server, port)?, port))
}

/// Starts all proxies that are installed.
pub(super) fn start(
    programs: &Programs,
    folder: &Folder,
    upstream: u16,
) -> Result<Vec<Proxy>, Box<dyn Error>> {
    // Every header that the gateway sets.
    let forwarded = "proxy_set_header Host $http_host; proxy_set_header X-Forwarded-For $remote_addr;
        proxy_set_header X-Real-IP $remote_addr; proxy_set_header X-Forwarded-Proto $scheme;
        proxy_set_header X-Forwarded-Port $server_port; proxy_set_header X-Forwarded-Host $http_host;
        proxy_set_header X-Request-Id $request_id;";
    let mut all = vec![
        nginx_proxy(folder, NGINX, "nginx", upstream, forwarded)?,
        nginx_proxy(folder, NGINX_BARE, "nginx-bare", upstream, "")?,
    ];
    if let Some(program) = &programs.haproxy {
        all.push(haproxy(program, folder, upstream)?);
    }
    if let Some(program) = &programs.envoy {
        all.push(envoy(program, folder, upstream)?);
    }
    Ok(all)
}

fn nginx(
    folder: &Folder,
    name: &str,
    workers: usize,
    http: &str,
    port: u16,
) -> Result<Running, Box<dyn Error>> {
    let at = folder.path().display();
    let config = format!(
        "daemon off; worker_processes {workers}; pid {at}/{name}.pid; error_log stderr crit;
        events {{ worker_connections 1024; }}
        http {{
            access_log off; keepalive_requests 1000000000;
            client_body_temp_path {at}/{name}-body; proxy_temp_path {at}/{name}-proxy;
            fastcgi_temp_path {at}/{name}-fastcgi; uwsgi_temp_path {at}/{name}-uwsgi; scgi_temp_path {at}/{name}-scgi;
            {http}
        }}"
    );
    let file = folder.write(&format!("{name}.conf"), &config)?.display().to_string();
    let arguments = ["-c", &file, "-p", &at.to_string(), "-e", "stderr"];
    Ok(Running::start(folder, name, Path::new("nginx"), &arguments, port)?)
}

fn nginx_proxy(
    folder: &Folder,
    name: &'static str,
    file: &str,
    upstream: u16,
    forwarded: &str,
) -> Result<Proxy, Box<dyn Error>> {
    let port = free_port()?;
    let http = format!(
        "limit_req_zone $http_x_user_id zone=plenty:10m rate=1000000r/s;
        limit_req_zone $http_x_user_id zone=little:10m rate=1r/m;
        limit_req_status 429;
        upstream behind {{ server 127.0.0.1:{upstream}; keepalive 128; keepalive_requests 1000000000; }}
        server {{
            listen 127.0.0.1:{port} backlog=4096;
            proxy_http_version 1.1; proxy_set_header Connection \"\"; {forwarded}
            location /allowed {{ limit_req zone=plenty burst=1000000 nodelay; proxy_pass http://behind; }}
            location /denied {{ limit_req zone=little; proxy_pass http://behind; }}
        }}"
    );
    Ok(Proxy { name, process: nginx(folder, file, workers(), &http, port)?, port, is_limited: true })
}

fn haproxy(program: &Path, folder: &Folder, upstream: u16) -> Result<Proxy, Box<dyn Error>> {
    let (port, threads) = (free_port()?, workers());
    let config = format!(
        "global
    nbthread {threads}
    maxconn 4096
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    http-reuse always
    option forwardfor
frontend front
    bind 127.0.0.1:{port} backlog 4096
    stick-table type string len 64 size 100k expire 10m store http_req_rate(60s)
    http-request track-sc0 req.hdr(X-User-Id)
    http-request deny deny_status 429 if {{ path_beg /denied }} {{ sc_http_req_rate(0) gt 1 }}
    http-request deny deny_status 429 if {{ sc_http_req_rate(0) gt 2000000000 }}
    http-request set-header X-Real-IP %[src]
    http-request set-header X-Forwarded-Proto http
    http-request set-header X-Forwarded-Port %[dst_port]
    http-request set-header X-Forwarded-Host %[req.hdr(host)]
    unique-id-format %{{+X}}o%pid%rt%Ts%ms
    unique-id-header X-Request-Id
    default_backend behind
backend behind
    server one 127.0.0.1:{upstream} pool-max-conn 128
"
    );
    let file = folder.write("haproxy.cfg", &config)?.display().to_string();
    let process = Running::start(folder, "haproxy", program, &["-db", "-q", "-f", &file], port)?;
    Ok(Proxy { name: HAPROXY, process, port, is_limited: true })
}

/// Returns a route of Envoy with a separate token bucket and rate limit headers.
fn envoy_route(path: &str, tokens: u32, every: &str) -> String {
    format!(
        "- match: {{ prefix: {path} }}
                  route: {{ cluster: behind }}
                  typed_per_filter_config:
                    envoy.filters.http.local_ratelimit:
                      '@type': type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit
                      stat_prefix: limit
                      token_bucket: {{ max_tokens: {tokens}, tokens_per_fill: {tokens}, fill_interval: {every} }}
                      filter_enabled: {{ default_value: {{ numerator: 100, denominator: HUNDRED }} }}
                      filter_enforced: {{ default_value: {{ numerator: 100, denominator: HUNDRED }} }}
                      enable_x_ratelimit_headers: DRAFT_VERSION_03"
    )
}

fn envoy(program: &Path, folder: &Folder, upstream: u16) -> Result<Proxy, Box<dyn Error>> {
    let port = free_port()?;
    let plenty = envoy_route("/allowed", 1_000_000_000, "1s");
    let little = envoy_route("/denied", 1, "3600s");
    let config = format!(
        "static_resources:
  listeners:
  - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          '@type': type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          use_remote_address: true
          route_config:
            virtual_hosts:
            - name: all
              domains: ['*']
              routes:
                {plenty}
                {little}
          http_filters:
          - name: envoy.filters.http.local_ratelimit
            typed_config:
              '@type': type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit
              stat_prefix: limit
          - name: envoy.filters.http.router
            typed_config:
              '@type': type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: behind
    type: STATIC
    load_assignment:
      cluster_name: behind
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {upstream} }} }} }}
"
    );
    let file = folder.write("envoy.yaml", &config)?.display().to_string();
    let threads = workers().to_string();
    let arguments = ["-c", &file, "--concurrency", &threads, "--disable-hot-restart", "--log-level", "error"];
    Ok(Proxy {
        name: ENVOY,
        process: Running::start(folder, "envoy", program, &arguments, port)?,
        port,
        is_limited: true,
    })
}
