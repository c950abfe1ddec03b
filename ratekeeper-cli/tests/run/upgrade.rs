//! Upgrades: a successor takes over without refusing a connection.

use std::net::TcpListener;
use std::process::Command;

use nix::sys::signal::Signal;
use testbed::wait_until;

use crate::run::support::{Folder, Load, Process, Upstream, get, one_route, ratekeeper};

/// Returns the id of the process started last.
async fn successor(process: &mut Process, count: usize) -> i32 {
    wait_until(|| process.count_lines("successor started") == count).await;
    let line = process.stderr().iter().rfind(|line| line.contains("successor started")).unwrap().clone();
    let number = line.split_once(r#""pid":"#).unwrap().1;
    number[..number.find(|c: char| !c.is_ascii_digit()).unwrap()].parse().unwrap()
}

/// Opens a connection per request, which would be refused without a listener.
fn fresh_connections(_: usize, _: u64) -> Vec<u8> {
    b"GET / HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn five_upgrades_under_load_refuse_no_connection_and_fail_no_request() {
    let (folder, upstream) = (Folder::new("upgrade"), Upstream::start().await);
    let file = folder.write("ratekeeper.yaml", &one_route(&upstream, "", ""));
    let (mut process, address) = Process::serving(&file).await;
    let admin = process.admin().await;
    let kept = Load::get(address, 8, "/");
    let fresh = Load::start(address, 4, fresh_connections, |_| Ok(()));
    kept.more(10).await;
    process.signal(Signal::SIGUSR2);
    let mut newest = successor(&mut process, 1).await;
    assert_eq!(process.ended().await, 0, "{:?}", process.stderr());
    for round in 2..=5 {
        wait_until(|| process.count_lines("took over from predecessor") == round - 1).await;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(newest), Signal::SIGUSR2).unwrap();
        newest = successor(&mut process, round).await;
        wait_until(|| process.count_lines(r#""message":"shut down""#) == round).await;
        kept.more(100).await;
        fresh.more(10).await;
    }
    // In-memory state is lost, and the process logs it.
    assert_eq!(process.count_lines("the successor starts with empty counters"), 5);
    // The admin address stays the same, too.
    assert_eq!(get(admin, "/readyz").await.status, 200);
    let (kept, fresh) = (kept.stop().await, fresh.stop().await);
    println!("5 upgrades under load: kept connections: {kept}\n  fresh connections: {fresh}");
    kept.assert_all(200);
    fresh.assert_all(200);
    assert_eq!(process.count_lines(r#""service":"gateway""#), 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn old_process_continues_if_the_successor_cannot_start() {
    let (folder, upstream) = (Folder::new("no-successor"), Upstream::start().await);
    let good = one_route(&upstream, "", "");
    let (mut process, address) = Process::serving(&folder.write("ratekeeper.yaml", &good)).await;
    folder.write("ratekeeper.yaml", "gateway: { routes: none }\n");
    process.signal(Signal::SIGUSR2);
    let line = process.line("successor exited before it was ready, still serving").await;
    assert!(line.contains("exit status: 2"), "{line}");
    assert_eq!(get(address, "/").await.status, 200);
    // The next upgrade can succeed.
    folder.write("ratekeeper.yaml", &good);
    process.signal(Signal::SIGUSR2);
    assert_eq!(process.ended().await, 0);
    assert_eq!(get(address, "/").await.status, 200);
}

#[tokio::test]
async fn systemd_sockets_are_used() {
    let (folder, upstream) = (Folder::new("systemd"), Upstream::start().await);
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = holder.local_addr().unwrap();
    let text = one_route(&upstream, "", "").replace("listen: 127.0.0.1:0", &format!("listen: {address}"));
    let file = folder.write("ratekeeper.yaml", &text);
    // As systemd does: the socket is descriptor 3, announced by variables. Without them, the address would be in use.
    let mut command = Command::new("sh");
    let script = format!(
        "export LISTEN_PID=$$; exec {} run --config {}",
        env!("CARGO_BIN_EXE_ratekeeper"),
        file.display()
    );
    command.args(["-c", &script]).env("LISTEN_FDS", "1");
    let mapping = command_fds::FdMapping { parent_fd: holder.try_clone().unwrap().into(), child_fd: 3 };
    command_fds::CommandFdExt::fd_mappings(&mut command, vec![mapping]).unwrap();
    let process = Process::spawn(&mut command);
    assert_eq!(process.address().await, address);
    assert_eq!(get(address, "/").await.status, 200);
    let mut second = Process::spawn(ratekeeper().args(["run", "--config"]).arg(&file));
    assert_eq!(second.ended().await, 1);
}
