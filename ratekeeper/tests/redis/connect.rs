//! Ways to connect to a server: a user with a password and minimal permissions, a Unix socket, TLS, Sentinel.

use std::fs;
use std::path::Path;
use std::time::Duration;

use ratekeeper::redis::{FailurePolicy, Settings, TakeResult};
use ratekeeper::{Charge, Limit, WindowAlign};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use testbed::process::free_port;
use testbed::{RedisServer, wait_until};

use crate::limits::every_limit;
use crate::redis::{PATIENT, all_expire, limiter};

fn five_an_hour() -> Limit {
    Limit::fixed_window(5, Duration::from_secs(3_600), WindowAlign::FirstRequest).unwrap()
}

/// Whether the server decides.
async fn is_decided_by(settings: &Settings) -> bool {
    let settings = settings.clone().deadline(PATIENT).on_store_failure(FailurePolicy::Closed);
    let limiter = limiter(&[five_an_hour()], &settings);
    let verdict = limiter.check("key").await;
    verdict.allowed() && !verdict.is_degraded()
}

/// The documented permissions are sufficient for all operations.
#[tokio::test]
async fn a_user_with_the_documented_rights() {
    let server = RedisServer::start().unwrap();
    let rights = "on >secret ~rate_limit:* +fcall +function|load +time +get +set +incrby +getrange +setrange +pexpire \
                  +pttl +unlink +zadd +zcard +zscore +zrange +zrem +hset +hget +hdel";
    let mut command = vec!["ACL", "SETUSER", "ratekeeper"];
    command.extend(rights.split_whitespace());
    assert_eq!(server.cli(&command).unwrap(), "OK");
    let address = |user: &str| format!("redis://{user}@127.0.0.1:{}", server.port());
    for (number, limit) in every_limit(300, 3_600).into_iter().enumerate() {
        let settings =
            Settings::new(&address("ratekeeper:secret")).deadline(PATIENT).namespace(&number.to_string());
        let limiter = limiter(&[limit], &settings);
        for _ in 0..150 {
            let verdict = limiter.check("key").await;
            assert!(verdict.allowed() && !verdict.is_degraded(), "{verdict:?}");
        }
        assert!(limiter.peek("key").await.allowed());
        limiter.reset("key").await.unwrap();
        let charge = Charge { limit: 0, key: limiter.key("key"), cost: 2 };
        let at = limiter.charge(&[charge]).await.unwrap().at();
        limiter.refund(&[charge], Some(at)).await.unwrap();
        limiter.refund(&[charge], None).await.unwrap();
        let (records, long) = (limiter.records(), Duration::from_secs(60));
        assert!(records.put("a", b"value", long).await.unwrap());
        assert!(records.take_due(10).await.unwrap().is_empty());
        assert_eq!(records.take("a").await.unwrap(), TakeResult::Record(b"value".to_vec()));
        assert_eq!(records.claim("a", b"request", long).await.unwrap(), None);
        records.set_response("a", b"answer", long).await.unwrap();
        records.remove("a").await.unwrap();
    }
    assert!(!is_decided_by(&Settings::new(&address("ratekeeper:wrong"))).await, "a wrong password");
    all_expire(&server);
}

#[tokio::test]
async fn unix_socket_is_supported() {
    let socket = std::env::temp_dir().join(format!("ratekeeper-{}.sock", std::process::id()));
    let socket = socket.to_string_lossy();
    let _server = RedisServer::start_with(&["--unixsocket", &socket]).unwrap();
    assert!(is_decided_by(&Settings::new(&format!("unix://{socket}"))).await);
    fs::remove_file(&*socket).unwrap();
}

/// A CA, and the certificates and keys that it signs for 127.0.0.1, in PEM.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new() -> Authority {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    fn sign(&self) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        // Must differ from the CA's name, or the server takes the certificate for a second CA.
        params.distinguished_name.push(DnType::CommonName, "somebody");
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

fn tls_server(folder: &Path, authority: &Authority, options: &[&str]) -> (RedisServer, String) {
    let (certificate, key) = authority.sign();
    let file = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).unwrap();
        path.to_string_lossy().into_owned()
    };
    let (certificate, key) = (file("server.pem", &certificate), file("server.key", &key));
    let authority = file("authority.pem", &authority.pem);
    let port = free_port().unwrap().to_string();
    let files = ["--tls-cert-file", &certificate, "--tls-key-file", &key, "--tls-ca-cert-file", &authority];
    let all: Vec<_> = ["--tls-port", &port].into_iter().chain(files).chain(options.iter().copied()).collect();
    (RedisServer::start_with(&all).unwrap(), format!("127.0.0.1:{port}"))
}

#[tokio::test]
async fn tls_uses_the_configured_ca_and_client_certificate() {
    let folder = std::env::temp_dir().join(format!("ratekeeper-tls-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (authority, stranger) = (Authority::new(), Authority::new());

    let (_server, address) = tls_server(&folder, &authority, &["--tls-auth-clients", "no"]);
    let settings = Settings::new(&format!("rediss://{address}"));
    assert!(is_decided_by(&settings.clone().tls_ca(authority.pem.as_bytes())).await);
    assert!(!is_decided_by(&settings.clone().tls_ca(stranger.pem.as_bytes())).await, "not whom we trust");
    assert!(!is_decided_by(&settings).await, "the system does not know the authority");

    let (_server, address) = tls_server(&folder, &authority, &["--tls-auth-clients", "yes"]);
    let settings = Settings::new(&format!("rediss://{address}")).tls_ca(authority.pem.as_bytes());
    assert!(!is_decided_by(&settings).await, "the server requires a client certificate");
    let (certificate, key) = authority.sign();
    assert!(is_decided_by(&settings.tls_certificate(certificate.as_bytes(), key.as_bytes())).await);
    fs::remove_dir_all(&folder).unwrap();
}

/// A cluster of one node, all of whose connections use TLS.
#[tokio::test]
async fn cluster_with_tls_is_supported() {
    let folder = std::env::temp_dir().join(format!("ratekeeper-tls-cluster-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (authority, stranger) = (Authority::new(), Authority::new());
    let bus = free_port().unwrap().to_string();
    let options = ["--cluster-enabled", "yes", "--cluster-port", &bus, "--tls-cluster", "yes"];
    let options: Vec<_> = ["--tls-auth-clients", "no"].into_iter().chain(options).collect();
    let (server, address) = tls_server(&folder, &authority, &options);
    assert_eq!(server.cli(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]).unwrap(), "OK");
    let settings = Settings::new(&format!("rediss+cluster://{address}"));
    let trusting = limiter(
        &[five_an_hour()],
        &settings
            .clone()
            .tls_ca(authority.pem.as_bytes())
            .deadline(PATIENT)
            .on_store_failure(FailurePolicy::Closed),
    );
    // The node takes a moment to report the cluster as ok.
    assert!(crate::redis::faults::until(&trusting, |verdict| !verdict.is_degraded()).await.allowed());
    let brief = settings.deadline(Duration::from_millis(500)).on_store_failure(FailurePolicy::Closed);
    let stranger = limiter(&[five_an_hour()], &brief.tls_ca(stranger.pem.as_bytes()));
    assert!(stranger.check("key").await.is_degraded(), "not whom we trust");
    fs::remove_dir_all(&folder).unwrap();
}

/// A cluster of one node. The node takes a moment to report it as ok.
async fn cluster_of_one(options: &[&str]) -> RedisServer {
    let bus = free_port().unwrap().to_string();
    let enabled = ["--cluster-enabled", "yes", "--cluster-port", &bus];
    let all: Vec<_> = enabled.into_iter().chain(options.iter().copied()).collect();
    let server = RedisServer::start_with(&all).unwrap();
    server.cli(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]).unwrap();
    wait_until(|| server.cli(&["CLUSTER", "INFO"]).unwrap().contains("cluster_state:ok")).await;
    server
}

/// Percent-encoding of a password works in every kind of address.
#[tokio::test]
async fn percent_encoded_password_is_decoded() {
    let server = cluster_of_one(&[]).await;
    server.cli(&["ACL", "SETUSER", "ratekeeper", "on", ">p%w/d", "~*", "+@all"]).unwrap();
    for scheme in ["redis", "redis+cluster"] {
        let url = format!("{scheme}://ratekeeper:p%25w%2Fd@127.0.0.1:{}", server.port());
        assert!(is_decided_by(&Settings::new(&url).namespace(scheme)).await, "{url}");
    }
}

/// A node that does not report its host is reached at the address that was queried.
#[tokio::test]
async fn node_without_a_host_is_reached_at_the_queried_address() {
    for kind in ["ip", "unknown-endpoint", "hostname"] {
        let server = cluster_of_one(&["--cluster-preferred-endpoint-type", kind]).await;
        let url = format!("redis+cluster://127.0.0.1:{}", server.port());
        assert!(is_decided_by(&Settings::new(&url)).await, "{kind}");
    }
}

/// Debug output of a limiter contains neither the password nor the secret.
#[tokio::test]
async fn debug_output_contains_no_secret() {
    let settings = Settings::new("redis://me:password@127.0.0.1:1").secret(b"a long secret");
    let limiter = limiter(&[five_an_hour()], &settings);
    let printed = format!("{limiter:?} {settings:?}");
    for hidden in ["password", "secret", "SipHasher", "k0"] {
        assert!(!printed.contains(hidden), "{hidden}: {printed}");
    }
}

#[tokio::test]
async fn invalid_address_is_an_error() {
    for address in ["", "disk", "http://127.0.0.1", "redis://"] {
        let made = ratekeeper::Limiter::builder(five_an_hour()).redis(&Settings::new(address));
        let message = made.map(|_| ()).unwrap_err().to_string();
        assert!(message.contains("redis://127.0.0.1:6379"), "{address}: {message}");
    }
}

#[test]
fn missing_runtime_is_an_error() {
    let made = ratekeeper::Limiter::builder(five_an_hour()).redis(&Settings::new("redis://127.0.0.1:1"));
    assert!(made.map(|_| ()).unwrap_err().to_string().contains("tokio runtime"));
}

/// A sentinel that monitors a master; it is killed when this value is dropped.
struct Sentinel {
    keeper: std::process::Child,
    port: u16,
}

impl Sentinel {
    fn start(folder: &Path, master: &RedisServer) -> Sentinel {
        let port = free_port().unwrap();
        let file = folder.join(format!("sentinel-{port}.conf"));
        let config = format!(
            "port {port}\nbind 127.0.0.1\ndir {}\nsentinel monitor primary 127.0.0.1 {} 1\n\
             sentinel down-after-milliseconds primary 500\nsentinel failover-timeout primary 2000\n",
            folder.display(),
            master.port()
        );
        fs::write(&file, config).unwrap();
        // As for the servers of the testbed: the shell kills it when our end of its stdin closes.
        let keeper = std::process::Command::new("sh")
            .args(["-c", "redis-server \"$1\" --sentinel >/dev/null 2>&1 & cat; kill -9 $!", "sentinel"])
            .arg(&file)
            .stdin(std::process::Stdio::piped())
            .spawn();
        Sentinel { keeper: keeper.unwrap(), port }
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

/// The sentinels name the master; when it dies they name another, which is used from then on.
#[tokio::test]
async fn failover_to_the_master_named_by_sentinels() {
    let folder = std::env::temp_dir().join(format!("ratekeeper-sentinel-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut master = RedisServer::start().unwrap();
    let master_port = master.port().to_string();
    let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &master_port]).unwrap();
    let sentinel = Sentinel::start(&folder, &master);

    let settings = Settings::new(&format!("redis+sentinel://127.0.0.1:{}/primary", sentinel.port))
        .deadline(Duration::from_millis(500))
        .on_store_failure(FailurePolicy::Closed);
    let limiter = limiter(&[five_an_hour()], &settings);
    let decided = crate::redis::faults::until(&limiter, |verdict| !verdict.is_degraded()).await;
    assert!(decided.allowed());
    assert_eq!(master.cli(&["DBSIZE"]).unwrap(), "1");
    // Before the failover, the sentinel must know the replica, and the replica must have the functions and the key.
    let redis_cli = |what: &'static str, port: u16| {
        let output = std::process::Command::new("redis-cli")
            .args(["-p", &port.to_string()])
            .args(what.split(' '))
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let is_ready = || {
        redis_cli("SENTINEL REPLICAS primary", sentinel.port).contains(&replica.port().to_string())
            && redis_cli("DBSIZE", replica.port()).contains('1')
    };
    wait_until(is_ready).await;

    master.kill().unwrap();
    crate::redis::faults::until(&limiter, ratekeeper::Verdict::is_degraded).await;
    let decided = crate::redis::faults::until(&limiter, |verdict| !verdict.is_degraded()).await;
    assert!(decided.decision().remaining < 4, "the replica knew what the master had counted");
    assert!(replica.cli(&["ROLE"]).unwrap().starts_with("master"));
    fs::remove_dir_all(&folder).unwrap();
}
