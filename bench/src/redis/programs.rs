//! Whole programs: concurrent tasks, through our client and through the usual Redis client.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use ratekeeper::redis::{Lease, Settings};
use ratekeeper::{Limit, Limiter, Rate, RefillStyle, WindowAlign};
use serde::Serialize;
use testbed::RedisServer;

use super::RedisSize;
use super::wire::Wire;
use crate::timing;

#[derive(Serialize)]
pub(crate) struct ProgramRow {
    pub(super) tasks: usize,
    pub(super) baseline: f64,
    pub(super) ours: f64,
}

/// One hot key, checked by 64 tasks: each decision by Redis, and from a lease.
#[derive(Serialize)]
pub(crate) struct LeaseFigures {
    pub(super) exact: f64,
    pub(super) leased: f64,
    pub(super) calls: u64,
    pub(super) checks: u64,
}

/// A denied key, checked repeatedly.
#[derive(Serialize)]
pub(crate) struct DenialFigures {
    pub(super) checks: u64,
    pub(super) calls: u64,
    pub(super) per_second: f64,
}

pub(super) fn run(
    server: &RedisServer,
    size: &RedisSize,
) -> Result<(Vec<ProgramRow>, DenialFigures, LeaseFigures), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let mut rows = Vec::new();
    for tasks in [1, 16, 64] {
        let checks = size.checks_per_task;
        let baseline = runtime.block_on(baseline(server, tasks, checks))?;
        let ours = runtime.block_on(ours(server, tasks, checks, None, 100))?;
        rows.push(ProgramRow { tasks, baseline, ours });
    }
    let denials = runtime.block_on(denials(server, size))?;
    let checks = size.checks_per_task;
    let exact = runtime.block_on(ours(server, 64, checks, None, 1))?;
    // 40 times the checks, so that both runs take about as long.
    let (before, checks) = (calls(server)?, checks * 40);
    let lease = Lease::new(100_000);
    let leased = runtime.block_on(ours(server, 64, checks, Some(lease), 1))?;
    let calls = calls(server)? - before;
    Ok((rows, denials, LeaseFigures { exact, leased, calls, checks: 64 * checks as u64 }))
}

/// Runs `tasks` concurrent tasks; returns decisions per second.
async fn rate<T>(tasks: usize, checks: usize, task: impl Fn(usize) -> T) -> Result<f64, Box<dyn Error>>
where
    T: Future<Output = Result<(), String>> + Send + 'static,
{
    let watch = timing::Watch::start();
    let running: Vec<_> = (0..tasks).map(|number| tokio::spawn(task(number))).collect();
    for task in running {
        task.await??;
    }
    Ok((tasks * checks) as f64 / watch.seconds())
}

/// Each task uses `keys` separate keys; if `keys` is 1, all tasks share one.
async fn ours(
    server: &RedisServer,
    tasks: usize,
    checks: usize,
    lease: Option<Lease>,
    keys: usize,
) -> Result<f64, Box<dyn Error>> {
    let limit =
        Limit::token_bucket(1_000_000_000, Rate::new(1, Duration::from_secs(1))?, RefillStyle::Smooth)?;
    let settings = Settings::new(&server.url()).namespace(&format!("{lease:?}/{keys}"));
    let mut settings = settings.deadline(Duration::from_secs(10)).connections(1);
    if let Some(lease) = lease {
        settings = settings.lease(0, lease);
    }
    let limiter = Arc::new(Limiter::builder(limit).redis(&settings)?);
    rate(tasks, checks, |task| {
        let limiter = limiter.clone();
        async move {
            for number in 0..checks {
                let task = if keys == 1 { 0 } else { task };
                let verdict = limiter.check(&(task, number % keys)).await;
                if !verdict.allowed() || verdict.is_degraded() {
                    return Err(format!("not decided: {verdict:?}"));
                }
            }
            Ok(())
        }
    })
    .await
}

async fn baseline(server: &RedisServer, tasks: usize, checks: usize) -> Result<f64, Box<dyn Error>> {
    let sha = Wire::connect(server.port())?.text(&["SCRIPT", "LOAD", include_str!("token_bucket.lua")])?;
    let connection = redis::Client::open(server.url())?.get_multiplexed_async_connection().await?;
    rate(tasks, checks, |task| {
        let (mut connection, sha) = (connection.clone(), sha.clone());
        async move {
            for number in 0..checks {
                let mut command = redis::cmd("EVALSHA");
                command.arg(&sha).arg(1).arg(format!("programs:{task}:{}", number % 100));
                command.arg(&["1000000", "1", "1", "3600"]);
                let result = command.query_async::<(i64, String, i64)>(&mut connection).await;
                result.map_err(|error| error.to_string())?;
            }
            Ok(())
        }
    })
    .await
}

async fn denials(server: &RedisServer, size: &RedisSize) -> Result<DenialFigures, Box<dyn Error>> {
    let limit = Limit::fixed_window(1, Duration::from_secs(86_400), WindowAlign::FirstRequest)?;
    let settings = Settings::new(&server.url()).namespace("denied").deadline(Duration::from_secs(10));
    let limiter = Limiter::builder(limit).redis(&settings)?;
    limiter.check("key").await;
    let before = calls(server)?;
    let checks = size.checks_per_task * 100;
    let watch = timing::Watch::start();
    for _ in 0..checks {
        if limiter.check("key").await.allowed() {
            return Err("a denied key was allowed".into());
        }
    }
    let per_second = checks as f64 / watch.seconds();
    Ok(DenialFigures { checks: checks as u64, calls: calls(server)? - before, per_second })
}

/// Returns the server's number of FCALL calls.
fn calls(server: &RedisServer) -> Result<u64, Box<dyn Error>> {
    let stats = Wire::connect(server.port())?.text(&["INFO", "commandstats"])?;
    let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_fcall:calls=")?.split(',').next());
    Ok(calls.ok_or("no statistics of FCALL")?.parse()?)
}
