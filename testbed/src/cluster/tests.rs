use super::*;
use crate::redis::is_running;

/// Timeout of steps whose duration is not under test, far longer than they take.
const LONG: Duration = Duration::from_secs(30);

/// Maximum time until a replica replaces a dead master.
const TAKEOVER: Duration = RedisCluster::NODE_TIMEOUT.saturating_add(Duration::from_secs(2));

/// The hash slot of a key, and its master.
fn location(cluster: &RedisCluster, key: &str) -> (u16, usize) {
    let slot = cluster.slot_of(key).unwrap();
    (slot, cluster.master_of(slot).unwrap())
}

/// Writes a key on its master and waits until the replica has it.
fn write(cluster: &RedisCluster, key: &str) {
    let (_, master) = location(cluster, key);
    let mut master = cluster.nodes()[master].client().unwrap();
    assert_eq!(master.command_text(&["SET", key, "here", "EX", "1000"]).unwrap(), "OK");
    assert_eq!(master.command_text(&["WAIT", "1", "5000"]).unwrap(), "1");
}

fn read(cluster: &RedisCluster, index: usize, key: &str) -> Result<String, String> {
    cluster.nodes()[index].command(&["GET", key]).map_err(|error| error.to_string())
}

fn another_master(cluster: &RedisCluster, than: usize) -> usize {
    [0, SLOTS / 2, SLOTS - 1]
        .into_iter()
        .map(|slot| cluster.master_of(slot).unwrap())
        .find(|&master| master != than)
        .unwrap()
}

#[test]
fn every_node_knows_all_nodes_at_the_start_and_drop_kills_all() {
    let cluster = RedisCluster::start().unwrap();
    let ports: Vec<_> = cluster.nodes().iter().map(RedisServer::port).collect();
    for node in cluster.nodes() {
        let info = node.command(&["CLUSTER", "INFO"]).unwrap();
        for line in ["cluster_state:ok", "cluster_slots_ok:16384", "cluster_known_nodes:6", "cluster_size:3"]
        {
            assert!(info.lines().any(|text| text == line), "{line}: {info}");
        }
        let slots = node.cli(&["CLUSTER", "SLOTS"]).unwrap();
        for port in &ports {
            assert!(slots.lines().any(|line| line == port.to_string()), "{port}: {slots}");
        }
        assert_eq!(slots.lines().filter(|&line| line == "127.0.0.1").count(), 6, "{slots}");
    }
    for (slot, master) in [(0, 0), (5460, 0), (5461, 1), (10_921, 1), (10_922, 2), (SLOTS - 1, 2)] {
        assert_eq!(cluster.master_of(slot).unwrap(), master, "{slot}");
    }
    assert!(cluster.master_of(SLOTS).is_err());
    for master in 0..3 {
        assert_eq!(cluster.replica_of(master).unwrap(), master + 3);
        assert!(cluster.replica_of(master + 3).is_err());
    }
    assert_eq!(
        cluster.slot_of("123456789").unwrap(),
        12739,
        "the example in the specification of Redis Cluster"
    );
    assert_eq!(cluster.slot_of("a{123456789}b").unwrap(), 12739);
    let url = format!("redis+cluster://127.0.0.1:{},127.0.0.1:{},127.0.0.1:{}", ports[0], ports[1], ports[2]);
    assert_eq!(cluster.url(), url);

    let pids: Vec<_> = cluster.nodes().iter().map(RedisServer::pid).collect();
    assert!(pids.iter().all(|&pid| is_running(pid)));
    cluster.nodes()[1].pause().unwrap();
    drop(cluster);
    assert!(!pids.iter().any(|&pid| is_running(pid)));
}

#[test]
fn replica_takes_over_from_a_dead_master_which_restarts_as_a_replica() {
    let mut cluster = RedisCluster::start().unwrap();
    write(&cluster, "key");
    let (slot, master) = location(&cluster, "key");
    let replica = cluster.replica_of(master).unwrap();
    cluster.kill(master).unwrap();
    assert_eq!(cluster.master_of(slot).unwrap(), master, "no node has noticed yet");
    assert!(cluster.wait_until_ok(Duration::ZERO).is_err());
    assert!(cluster.keys_without_expiry().is_err(), "no answer is not the answer `none`");
    cluster.wait_until_ok(TAKEOVER).unwrap();
    assert_eq!(cluster.master_of(slot).unwrap(), replica);
    assert_eq!(read(&cluster, replica, "key").unwrap(), "here");
    assert_eq!(cluster.keys_without_expiry().unwrap(), Vec::<String>::new());

    assert!(cluster.wait_until_whole(Duration::ZERO).is_err());
    cluster.restart(master).unwrap();
    cluster.wait_until_whole(LONG).unwrap();
    assert_eq!(cluster.master_of(slot).unwrap(), replica);
    assert_eq!(cluster.replica_of(replica).unwrap(), master);
    // The second node has won an election shortly before, so its failover needs a retry.
    cluster.failover(master).unwrap();
    cluster.failover(replica).unwrap();
}

#[test]
fn paused_master_is_replaced_and_becomes_a_replica_when_resumed() {
    let cluster = RedisCluster::start().unwrap();
    let (slot, master) = location(&cluster, "key");
    let replica = cluster.replica_of(master).unwrap();
    cluster.nodes()[master].pause().unwrap();
    cluster.wait_until_ok(LONG).unwrap();
    assert_eq!(cluster.master_of(slot).unwrap(), replica);
    cluster.nodes()[master].resume().unwrap();
    assert_eq!(cluster.master_of(slot).unwrap(), replica, "its own word is out of date");
    cluster.wait_until_whole(LONG).unwrap();
    assert_eq!(cluster.replica_of(replica).unwrap(), master);
}

#[test]
fn repeated_failovers_swap_a_master_and_its_replica() {
    let cluster = RedisCluster::start().unwrap();
    write(&cluster, "key");
    let (slot, mut master) = location(&cluster, "key");
    assert!(cluster.failover(master).is_err(), "it is no replica");
    for _ in 0..4 {
        let replica = cluster.replica_of(master).unwrap();
        cluster.failover(replica).unwrap();
        assert_eq!(cluster.master_of(slot).unwrap(), replica);
        assert_eq!(read(&cluster, replica, "key").unwrap(), "here");
        let moved = format!("MOVED {slot} 127.0.0.1:{}", cluster.nodes()[replica].port());
        assert_eq!(read(&cluster, master, "key").unwrap_err(), moved);
        cluster.wait_until_whole(LONG).unwrap();
        master = replica;
    }
}

#[test]
fn migrated_hash_slot_is_served_by_its_new_master() {
    let cluster = RedisCluster::start().unwrap();
    let (slot, from) = location(&cluster, "{tag}");
    let to = another_master(&cluster, from);
    let keys: Vec<_> = (0..250).map(|number| format!("{{tag}} {number}\n")).collect();
    for key in &keys {
        cluster.nodes()[from].command(&["SET", key, "here", "EX", "1000"]).unwrap();
    }
    assert!(cluster.move_slot(slot, to, from).is_err(), "it is not that one's");
    cluster.move_slot(slot, from, to).unwrap();
    assert_eq!(cluster.master_of(slot).unwrap(), to);
    let moved = format!("MOVED {slot} 127.0.0.1:{}", cluster.nodes()[to].port());
    for key in &keys {
        assert_eq!(read(&cluster, to, key).unwrap(), "here");
        assert_eq!(read(&cluster, from, key).unwrap_err(), moved);
    }
    // A key without an expiry is found on every master.
    assert_eq!(cluster.keys_without_expiry().unwrap(), Vec::<String>::new());
    cluster.nodes()[to].command(&["SET", "{tag}", "for ever"]).unwrap();
    assert_eq!(cluster.keys_without_expiry().unwrap(), ["{tag}"]);
    cluster.wait_until_whole(LONG).unwrap();
    cluster.move_slot(slot, to, from).unwrap();
    assert_eq!(read(&cluster, from, &keys[249]).unwrap(), "here");
}

/// Regression: a new master died before its replica knew of the migrated hash slot. The replica took over all other
/// hash slots, and this one had no owner until the dead node was restarted.
#[test]
fn all_nodes_know_the_new_master_when_a_migration_ends() {
    let cluster = RedisCluster::start().unwrap();
    for slot in 0..100 {
        let from = cluster.master_of(slot).unwrap();
        cluster.move_slot(slot, from, another_master(&cluster, from)).unwrap();
        cluster.wait_until_ok(Duration::ZERO).unwrap();
    }
}

#[test]
fn half_migrated_hash_slot_replies_with_ask() {
    let cluster = RedisCluster::start().unwrap();
    let (slot, from) = location(&cluster, "{tag}");
    let to = another_master(&cluster, from);
    let keys = ["{tag}1", "{tag}2", "{tag}3"];
    for key in keys {
        cluster.nodes()[from].command(&["SET", key, "here"]).unwrap();
    }
    let ask = Err(format!("ASK {slot} 127.0.0.1:{}", cluster.nodes()[to].port()));
    let moved = Err(format!("MOVED {slot} 127.0.0.1:{}", cluster.nodes()[from].port()));
    let here = || keys.iter().filter(|key| read(&cluster, from, key) == Ok("here".into())).count();
    let redirected = || keys.iter().filter(|key| read(&cluster, from, key) == ask).count();

    let slot_move = cluster.begin_move(slot, from, to).unwrap();
    assert_eq!((here(), redirected()), (3, 0));
    assert_eq!(read(&cluster, from, "{tag}new"), ask);
    assert_eq!(cluster.move_keys(slot_move, 0).unwrap(), 0);
    assert_eq!(cluster.move_keys(slot_move, 1).unwrap(), 1);
    assert_eq!((here(), redirected()), (2, 1));
    assert_eq!(cluster.keys_without_expiry().unwrap().len(), 3, "on either side");
    assert!(cluster.end_move(slot_move).is_err(), "there are keys left");
    assert_eq!(cluster.move_keys(slot_move, usize::MAX).unwrap(), 2);
    assert_eq!((here(), redirected()), (0, 3));
    // The new master serves only clients that the old one has redirected.
    assert_eq!(read(&cluster, to, keys[0]), moved);
    let mut new = cluster.nodes()[to].client().unwrap();
    new.command(&["ASKING"]).unwrap();
    assert_eq!(new.command_text(&["GET", keys[0]]).unwrap(), "here");
    assert_eq!(cluster.master_of(slot).unwrap(), from);
    cluster.end_move(slot_move).unwrap();
    assert_eq!(cluster.master_of(slot).unwrap(), to);
    assert_eq!(read(&cluster, to, keys[0]).unwrap(), "here");
}
