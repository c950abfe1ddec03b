//! The session of a client: protocol version, authentication, and the commands that check no limit.

use testbed::RedisServer;

use super::support::{Client, TestApi, TestSettings, command};

/// Replies are compared with those of a real Redis, byte by byte: clients match on these texts.
#[tokio::test]
async fn replies_match_redis() {
    let redis = RedisServer::start().unwrap();
    let api = TestApi::start().await;
    for line in [
        "PING",
        "ping hello",
        "PING a b",
        "ECHO hello",
        "ECHO",
        "FOO",
        "FOO bar baz",
        "foo \r\n",
        "CLIENT",
        "CLIENT FOO",
        "CLIENT SETNAME",
        "CLIENT GETNAME",
        "CLIENT SETNAME a\nb",
        "CLIENT SETNAME me",
        "CLIENT ID x",
        "SELECT 0",
        "SELECT 99",
        "SELECT x",
        "SELECT",
        "HELLO 4",
        "HELLO x",
        "HELLO 3 FOO",
        "HELLO 3 SETNAME",
        "AUTH x",
        "AUTH",
        "AUTH a b c",
        "COMMAND FOO",
        "COMMAND DOCS nope",
        "COMMAND INFO nope",
        "RESET",
        "QUIT",
    ] {
        let (mut ours, mut theirs) = (api.connect().await, client(&redis).await);
        assert_eq!(ours.call(line).await, theirs.call(line).await, "{line}");
    }
    for bytes in [
        &b"PING\r\n"[..],
        b"\r\n\r\nPING\n",
        b"  PING  \r\n",
        b"*0\r\nPING\r\n",
        b"*-1\r\nPING\r\n",
        b"ECHO 'a b'\r\n",
        b"ECHO \"a b\"\r\n",
        b"ECHO ''\r\n",
        b"*2\r\n$4\r\nECHO\r\n$0\r\n\r\n",
    ] {
        let (mut ours, mut theirs) = (api.connect().await, client(&redis).await);
        ours.send(bytes).await;
        theirs.send(bytes).await;
        assert_eq!(ours.reply().await, theirs.reply().await, "{}", bytes.escape_ascii());
    }
}

async fn client(redis: &RedisServer) -> Client {
    Client::connect(([127, 0, 0, 1], redis.port()).into()).await
}

/// Where Redis closes the connection, so does the API, with an error that begins with the same text.
#[tokio::test]
async fn protocol_errors_close_the_connection_as_redis_does() {
    let redis = RedisServer::start().unwrap();
    let api = TestApi::start().await;
    for bytes in [
        &b"*1\r\n#3\r\n"[..],
        b"*1\r\n*1\r\n$4\r\nPING\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n$x\r\n",
        b"*1\r\n$99999999999\r\n",
        b"*x\r\n",
        b"*99999999999\r\n",
        b"PING 'a\r\n",
        b"PING 'a'b\r\n",
        b"PING\r\n*1\r\n:1\r\n",
        b"QUIT\r\nPING\r\n",
        b"POST / HTTP/1.1\r\nHost: a.test\r\n\r\nPING\r\n",
        b"host: a.test\r\nPING\r\n",
    ] {
        let (mut ours, mut theirs) = (api.connect().await, client(&redis).await);
        ours.send(bytes).await;
        theirs.send(bytes).await;
        let (ours, theirs) = (ours.rest().await, theirs.rest().await);
        let begin = theirs.trim_end();
        assert!(ours.starts_with(begin) && ours.is_empty() == theirs.is_empty(), "{ours} for {theirs}");
    }
}

#[tokio::test]
async fn hello_selects_the_protocol_version() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    assert!(client.call("HELLO").await.starts_with("*14\r\n$6\r\nserver\r\n$10\r\nratekeeper\r\n"));
    assert_eq!(client.call("CLIENT GETNAME").await, "$-1\r\n");
    let hello = client.call("HELLO 3 SETNAME me").await;
    assert!(hello.starts_with("%7\r\n") && hello.contains("$5\r\nproto\r\n:3\r\n"), "{hello}");
    assert_eq!(client.call("CLIENT GETNAME").await, "$2\r\nme\r\n");
    assert_eq!(client.call("COMMAND INFO nope").await, "*1\r\n_\r\n");
    assert_eq!(client.call("COMMAND DOCS").await, "%0\r\n");
    // Integers are the same in both versions.
    assert_eq!(client.numbers("CL.THROTTLE user 0 1 1").await, [0, 1, 0, -1, 1]);
    assert!(client.call("HELLO 2").await.starts_with("*14\r\n"));
    assert_eq!(client.call("RESET").await, "+RESET\r\n");
    assert_eq!(client.call("CLIENT GETNAME").await, "$-1\r\n");
}

#[tokio::test]
async fn connection_commands_of_clients_are_answered() {
    let api = TestApi::start().await;
    let mut client = api.connect().await;
    assert_eq!(client.call("CLIENT SETINFO LIB-NAME redis-py").await, "+OK\r\n");
    let (first, second) = (client.call("CLIENT ID").await, api.connect().await.call("CLIENT ID").await);
    assert_ne!(first, second);
    let commands = client.call("COMMAND").await;
    assert!(commands.contains("$11\r\ncl.throttle\r\n:-1\r\n*2\r\n+write\r\n+fast\r\n:1\r\n:1\r\n:1\r\n"));
    let count = client.call("COMMAND COUNT").await;
    assert!(commands.starts_with(&count.replace(':', "*")), "{count}");
    let list = client.call("COMMAND LIST").await;
    assert!(list.starts_with(&count.replace(':', "*")) && list.contains("$8\r\nrk.check\r\n"), "{list}");
    let info = api.info().await;
    assert_eq!((&*info["loading"], &*info["redis_mode"]), ("0", "standalone"));
}

#[tokio::test]
async fn commands_require_the_token() {
    let api = TestApi::start_with(TestSettings {
        token: Some("open-sesame-open-sesame"),
        ..TestSettings::default()
    })
    .await;
    let mut client = api.connect().await;
    let wrong = "-WRONGPASS invalid username-password pair or user is disabled.\r\n";
    for line in
        ["CL.THROTTLE k 1 1 1", "RK.CHECK all", "INFO", "COMMAND", "CLIENT ID", "FOO", "SELECT 0", "ECHO x"]
    {
        assert_eq!(client.call(line).await, "-NOAUTH Authentication required.\r\n", "{line}");
    }
    assert_eq!(client.call("PING").await, "+PONG\r\n");
    assert!(client.call("HELLO 3").await.starts_with("-NOAUTH HELLO must be called"));
    for line in [
        "AUTH open-sesam",
        "AUTH open-sesame-open-sesamee",
        "AUTH root open-sesame-open-sesame",
        "HELLO 3 AUTH default x",
    ] {
        assert_eq!(client.call(line).await, wrong, "{line}");
    }
    assert_eq!(client.call("AUTH open-sesame-open-sesame").await, "+OK\r\n");
    assert_eq!(client.numbers("CL.THROTTLE k 1 1 1").await[0], 0);
    // `RESET` ends the authentication.
    assert_eq!(client.call("RESET").await, "+RESET\r\n");
    assert_eq!(client.call("ECHO x").await, "-NOAUTH Authentication required.\r\n");
    assert_eq!(client.call("AUTH default open-sesame-open-sesame").await, "+OK\r\n");
    let mut other = api.connect().await;
    assert!(
        other.call("HELLO 3 AUTH default open-sesame-open-sesame SETNAME me").await.starts_with("%7\r\n")
    );
    assert_eq!(other.call("CLIENT GETNAME").await, "$2\r\nme\r\n");
}

#[tokio::test]
async fn connection_closes_after_eight_wrong_tokens() {
    let api = TestApi::start_with(TestSettings {
        token: Some("open-sesame-open-sesame"),
        ..TestSettings::default()
    })
    .await;
    let mut client = api.connect().await;
    client.send(&[command("AUTH wrong").repeat(100), command("AUTH open-sesame-open-sesame")].concat()).await;
    let input = client.rest().await;
    assert_eq!(input.matches("-WRONGPASS").count(), 8, "{input}");
    assert!(!input.contains("+OK"));
}

/// The replies do not depend on how the input is split.
#[tokio::test]
async fn split_commands_are_answered_alike() {
    let api = TestApi::start().await;
    let input =
        [&command("ECHO hello")[..], b"PING\r\n", &command("CL.THROTTLE split 100 1 1"), b"\r\nPING x\r\n"];
    let input = input.concat();
    for cut in 1..input.len() {
        let mut client = api.connect().await;
        let (first, second) = input.split_at(cut);
        client.send(first).await;
        // So that the first part is read separately.
        tokio::task::yield_now().await;
        client.send(second).await;
        assert_eq!(client.reply().await, "$5\r\nhello\r\n", "cut at {cut}");
        assert_eq!(client.reply().await, "+PONG\r\n");
        assert!(client.reply().await.starts_with("*5\r\n:"));
        assert_eq!(client.reply().await, "$1\r\nx\r\n");
    }
    let mut client = api.connect().await;
    for byte in &input {
        client.send(&[*byte]).await;
        tokio::task::yield_now().await;
    }
    assert_eq!(client.reply().await, "$5\r\nhello\r\n");
}
