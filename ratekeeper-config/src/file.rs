//! A whole file: store, client addresses, responses, limits, domains, gateway and APIs.

use std::time::Duration;

use ratekeeper_rules::client::{Grouping, Source, TrustedProxies};
use ratekeeper_rules::path::{AmbiguousPathPolicy, PathNormalization};
use ratekeeper_rules::response::{DenialResponse, HeaderSet, NameError, PolicyName};
use ratekeeper_rules::rule::{Rules, RulesError};

use crate::apis::{Api, Apis, admin, apis};
use crate::concurrency::ConcurrencyLimit;
use crate::environment::{Environment, Secret};
use crate::envoy::{Domain, domains};
use crate::error::{Diagnostic, known_help, listed, quoted};
use crate::gateway::{ALL, Gateway, LimitKind, LimitNames, NONE, gateway};
use crate::quantity::ValueError;
use crate::reader::{Entry, Reader};
use crate::rule::{Defaults, NamedLimit, named_limit};
use crate::store::{Store, store};
use crate::tree::{Node, NodeValue};
use crate::when::{cidr, header_name};
use crate::{LIMITS_MAX, names, warnings, words};

pub(crate) const EXAMPLE: &str = "write a file as in `limits: { per-user: { key: ip, token_bucket: {} } }`";

/// A parsed and checked configuration file.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where limit state is stored.
    pub store: Store,
    /// How client addresses are determined.
    pub client: TrustedProxies,
    /// Path normalization.
    pub paths: PathNormalization,
    /// Responses to clients.
    pub responses: Responses,
    /// Verification of tokens whose claims are used in keys and conditions.
    pub jwt: Option<Jwt>,
    /// The rules in file order: those of `limits` first, then those of descriptors.
    pub rules: Rules,
    /// Number of rules that come from `limits`. They precede all others.
    pub named_limits: usize,
    /// The response to a denied request, for each rule.
    pub deny_responses: Vec<DenialResponse>,
    /// The name of each rule in responses.
    pub names: Vec<PolicyName>,
    /// The concurrency limits, in file order.
    pub concurrency: Vec<ConcurrencyLimit>,
    /// The domains of the Envoy API.
    pub domains: Vec<Domain>,
    /// The gateway, if one is configured.
    pub gateway: Option<Gateway>,
    /// The admin listener for metrics and health checks, unless it is off.
    pub admin: Option<Api>,
    /// The APIs.
    pub apis: Apis,
    /// How keys appear in the access log.
    pub log_keys: LogKeys,
    /// Risks in the file.
    pub warnings: Vec<Diagnostic>,
}

/// Responses to clients.
#[derive(Clone, Debug, Default)]
pub struct Responses {
    /// The rate limit headers.
    pub headers: HeaderSet,
    /// Maximum random time added to retry times, in seconds.
    pub jitter_secs: u64,
}

/// How the key of a request appears in the access log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogKeys {
    /// As a keyed hash: lines of the same key can be found, the key cannot be read.
    #[default]
    Hash,
    /// Not at all.
    Off,
    /// As text.
    Text,
}

/// Verification of tokens.
#[derive(Clone, Debug)]
pub struct Jwt {
    /// A JSON Web Key Set.
    pub keys: Secret,
    /// The header that contains the token, in lower case.
    pub header: String,
    /// The required issuer.
    pub issuer: Option<String>,
    /// The accepted audiences.
    pub audience: Vec<String>,
    /// The accepted signature algorithms. If empty, those of the keys.
    pub algorithms: Vec<String>,
}

pub(crate) fn document(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> Option<Config> {
    if matches!(node.value, NodeValue::Nothing) {
        reader.error(node.position, "the file is empty", EXAMPLE);
        return None;
    }
    let fields = reader.fields(node, "the file", names::FILE, EXAMPLE)?;
    // A misspelt section has been reported, so errors that follow from its absence are not.
    let is_incomplete = fields.get("limits").is_none() && !fields.lacks("limits");
    let (store, instances) = store(reader, fields.get("store"), environment);
    let (client, grouping) = client(reader, fields.get("client"));
    let (paths, is_case_set) = reader.or(fields.get("paths"), (default_paths(), false), paths);
    (reader.paths, reader.has_tokens) = (paths, !fields.lacks("jwt"));
    reader.has_proxies |= !fields.has("client") && !fields.lacks("client");
    let responses = reader.or(fields.get("responses"), Responses::default(), responses);
    let jwt = fields.get("jwt").and_then(|node| jwt(reader, node, environment));
    let mut limits = Vec::new();
    let mut is_incomplete = is_incomplete;
    if let Some(node) = fields.get("limits") {
        let fields = reader.named(node, "`limits`", EXAMPLE);
        is_incomplete |= fields.is_none();
        limits = fields.iter().flat_map(|fields| fields.iter()).collect();
        is_incomplete |= remove_misplaced(reader, &mut limits);
    }
    if limits.len() > LIMITS_MAX {
        let message = format!("too many limits: {} of at most {LIMITS_MAX}", limits.len());
        let help = "join limits that differ only by client: use `key` or `overrides`";
        reader.error(fields.entry("limits")?.position, message, help);
        return None;
    }
    let (mut rules, mut deny_responses, mut policies, mut concurrency) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut known = Vec::new();
    for entry in limits.iter().copied() {
        let policy = policy_name(reader, entry);
        let kind = match (named_limit(reader, entry, &Defaults { instances }, policy.clone()), policy) {
            (Some(NamedLimit::Rule(mut rule, deny_response)), Some(policy)) => {
                rule.key = rule.key.grouped(grouping);
                rules.push(*rule);
                deny_responses.push(deny_response);
                policies.push(policy);
                LimitKind::Rule(rules.len() - 1)
            }
            (Some(NamedLimit::ConcurrencyLimit(mut bound)), _) => {
                bound.key = bound.key.grouped(grouping);
                concurrency.push(bound);
                LimitKind::ConcurrencyLimit(concurrency.len() - 1)
            }
            _ => LimitKind::Wrong,
        };
        known.push((entry.name, kind));
    }
    let known = LimitNames::new(&known, is_incomplete);
    let named_limits = rules.len();
    let (domains, domain_rules) = domains(reader, fields.get("domains"), named_limits);
    for rule in domain_rules {
        if let Some(entry) = limits.iter().find(|entry| entry.name == rule.name) {
            let message = format!("duplicate name {}: a descriptor has it already", quoted(entry.name));
            reader.error(entry.position, message, "write another name, as in `per-user`");
        }
        deny_responses.push(DenialResponse::default());
        policies.extend(PolicyName::new(&rule.name).ok());
        rules.push(rule);
    }
    let gateway = fields.get("gateway").and_then(|node| gateway(reader, node, &known, environment));
    let apis = apis(reader, fields.get("apis"), &known, environment);
    let admin = admin(reader, fields.get("admin"), environment);
    let log_keys = reader.or(fields.get("log"), LogKeys::default(), log_keys);
    if let Some(gateway) = &gateway {
        // The HTTP API and the Redis API check limits by name.
        if apis.http.is_none() && apis.resp.is_none() {
            warnings::unused_limits(reader, gateway, &limits);
        }
        warnings::unreachable_routes(reader, gateway);
    }
    if !is_case_set {
        let conditions = rules.iter().map(|rule| (&*rule.name, &rule.when));
        let conditions = conditions.chain(concurrency.iter().map(|limit| (&*limit.name, &limit.when)));
        warnings::case_of_paths(reader, gateway.as_ref(), &limits, conditions);
    }
    warnings::own_listeners(reader);
    if !reader.problems.is_empty() {
        return None;
    }
    // Bans and names have been checked where they are read, except the generated names of overrides and bans.
    let wrong = |error: RulesError| {
        let (RulesError::SameName(name) | RulesError::Ban(name, _)) = &error;
        let position =
            limits.iter().find(|entry| entry.name == name).map_or(node.position, |entry| entry.position);
        reader.error(
            position,
            error.to_string(),
            "a ban or an override has this name; write another, as in `per-user`",
        );
    };
    let rules = Rules::new(rules).map_err(wrong).ok()?;
    Some(Config {
        store: store?,
        client,
        paths,
        responses,
        jwt,
        rules,
        named_limits,
        deny_responses,
        names: policies,
        concurrency,
        domains,
        gateway,
        admin,
        apis,
        log_keys,
        warnings: Vec::new(),
    })
}

/// Removes fields of a limit that stand beside it instead of inside. Returns whether there are any.
fn remove_misplaced(reader: &mut Reader, limits: &mut Vec<Entry<'_>>) -> bool {
    let is_misplaced = |entry: &Entry<'_>| {
        let NodeValue::Map(fields) = &entry.node.value else { return names::is_limit_field(entry.name) };
        let is_limit =
            |name: &Node| matches!(&name.value, NodeValue::Word(word) if names::is_limit_field(word));
        names::is_limit_field(entry.name) && !fields.iter().any(|(name, _)| is_limit(name))
    };
    let (mut kept, mut owner) = (Vec::new(), None);
    let count = limits.len();
    for entry in limits.drain(..) {
        match (owner, is_misplaced(&entry)) {
            (Some(owner), true) => {
                let message = format!("{} is a field of a limit, not a limit", quoted(entry.name));
                reader.error(entry.position, message, format!("indent this under {}", quoted(owner)));
                // Without the field, the limit above may be incomplete.
                kept.pop_if(|before: &mut Entry<'_>| before.name == owner);
            }
            _ => {
                owner = Some(entry.name);
                kept.push(entry);
            }
        }
    }
    *limits = kept;
    limits.len() < count
}

/// The name of a limit in responses.
fn policy_name(reader: &mut Reader, entry: Entry<'_>) -> Option<PolicyName> {
    if entry.name == ALL || entry.name == NONE {
        let message =
            format!("{} is reserved: `limits: {}` in a route has a meaning", quoted(entry.name), entry.name);
        reader.error(entry.position, message, "write another name, as in `per-user`");
        return None;
    }
    let policy = PolicyName::new(entry.name);
    if let Err(error) = &policy {
        let help = "write letters, digits and dashes, as in `per-user`";
        reader.error(entry.position, name_error(entry.name, error), help);
    }
    policy.ok()
}

/// Describes why a name cannot be used in responses.
fn name_error(name: &str, error: &NameError) -> String {
    match error {
        NameError::Empty => "the name of the limit is empty".to_owned(),
        NameError::TooLong(length) => {
            format!(
                "the name {} has {length} characters; the maximum is {}",
                quoted(name),
                PolicyName::LENGTH_MAX
            )
        }
        _ => format!("the name {} is not plain ASCII, which response headers need", quoted(name)),
    }
}

fn client(reader: &mut Reader, node: Option<&Node>) -> (TrustedProxies, Grouping) {
    let example = "write as in `client: { trusted_proxies: [10.0.0.0/8], source: x_forwarded_for }`";
    let fields = node.and_then(|node| reader.fields(node, "`client`", names::CLIENT, example));
    let Some(fields) = fields else {
        // The error has been recorded. Assume that proxies were listed, so that no further errors follow from it.
        reader.has_proxies = node.is_some();
        return (TrustedProxies::default(), Grouping::default());
    };
    let mut proxies = Vec::new();
    for node in fields.get("trusted_proxies").map_or(Vec::new(), |node| reader.list(node)) {
        let proxy = reader.parsed(node, cidr);
        if proxy.is_some_and(|proxy| proxy.prefix_len() == 0) {
            let message = "`trusted_proxies` contains all addresses, so clients could forge their own";
            reader.error(node.position, message, "write the networks of your proxies, as in `10.0.0.0/8`");
        }
        proxies.extend(proxy);
    }
    reader.has_proxies = match fields.get("trusted_proxies") {
        Some(node) => !reader.list(node).is_empty(),
        None => !fields.lacks("trusted_proxies"),
    };
    if let (false, Some(source)) = (reader.has_proxies, fields.entry("source")) {
        let message = "`source` has no effect without `trusted_proxies`";
        reader.error(
            source.position,
            message,
            "write the networks of your proxies, as in `trusted_proxies: [10.0.0.0/8]`",
        );
    }
    let source = reader.or(fields.get("source"), Source::XForwardedFor, |reader, node| {
        reader.choice(node, "source", &words::SOURCES)
    });
    let grouping = reader.or(fields.get("ipv6_prefix"), Grouping::default(), |reader, node| {
        let prefixes = Grouping::IPV6_PREFIXES;
        let range = u32::from(*prefixes.start())..=u32::from(*prefixes.end());
        let bits = reader.number(node, "ipv6_prefix", range)?;
        u8::try_from(bits).ok().and_then(Grouping::by_ipv6_prefix)
    });
    (TrustedProxies::proxies(proxies).with_source(source), grouping)
}

/// The path normalization, and whether the file says how letter case is compared.
fn paths(reader: &mut Reader, node: &Node) -> Option<(PathNormalization, bool)> {
    let example = "write as in `paths: { ambiguous: reject, case: exact, trailing_slash: ignore }`";
    let fields = reader.fields(node, "`paths`", names::PATHS, example)?;
    let paths = PathNormalization {
        ambiguous: reader.or(fields.get("ambiguous"), AmbiguousPathPolicy::Reject, |reader, node| {
            reader.choice(node, "ambiguous", &words::AMBIGUOUS)
        }),
        ignore_case: reader
            .or(fields.get("case"), false, |reader, node| reader.choice(node, "case", &words::CASE)),
        ignore_trailing_slash: reader.or(fields.get("trailing_slash"), true, |reader, node| {
            reader.choice(node, "trailing_slash", &words::TRAILING_SLASH)
        }),
        ..default_paths()
    };
    Some((paths, fields.has("case")))
}

/// Decodes delimiters as most servers do: `/%40me` is `/@me`, so a limit on one cannot be bypassed with the other.
fn default_paths() -> PathNormalization {
    PathNormalization { decode_delimiters: true, ignore_trailing_slash: true, ..PathNormalization::default() }
}

fn responses(reader: &mut Reader, node: &Node) -> Option<Responses> {
    let example = "write as in `responses: { header_set: ietf, jitter: 5s }`";
    let fields = reader.fields(node, "`responses`", names::RESPONSES, example)?;
    let known: Vec<&str> = HeaderSet::all().map(HeaderSet::name).collect();
    let headers = reader.or(fields.get("header_set"), HeaderSet::default(), |reader, node| {
        reader.parsed(node, |word| {
            HeaderSet::named(word).ok_or_else(|| ValueError {
                message: format!("unknown header set {}", quoted(word)),
                help: known_help(word, &known, &format!("Header sets: {}", listed(&known))),
            })
        })
    });
    let jitter = reader.or(fields.get("jitter"), Duration::ZERO, |reader, node| {
        let jitter = reader.length(node, "a jitter", Duration::from_secs(1), Duration::from_secs(3_600))?;
        if jitter.subsec_nanos() > 0 {
            let help = format!("write `{}s` or `{}s`", jitter.as_secs(), jitter.as_secs() + 1);
            reader.error(node.position, "`jitter` must be whole seconds, as in `Retry-After`", help);
        }
        Some(jitter)
    });
    Some(Responses { headers, jitter_secs: jitter.as_secs() })
}

fn log_keys(reader: &mut Reader, node: &Node) -> Option<LogKeys> {
    let fields = reader.fields(node, "`log`", names::LOG, "write as in `log: { keys: hash }`")?;
    Some(reader.or(fields.get("keys"), LogKeys::default(), |reader, node| {
        reader.choice(node, "keys", &words::LOG_KEYS)
    }))
}

fn jwt(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> Option<Jwt> {
    let example = "write as in `jwt: { keys: { file: jwks.json }, issuer: https://id.example.com }`";
    let fields = reader.fields(node, "`jwt`", names::JWT, example)?;
    reader.require(&fields, &["keys"], example);
    let keys = fields.get("keys").and_then(|node| {
        let keys = reader.secret(node, "keys", environment)?;
        if !keys.reveal().trim_start().starts_with('{') {
            let help = "write a file that contains `{ \"keys\": [...] }`";
            reader.error(node.position, "not a JSON Web Key Set", help);
        }
        Some(keys)
    });
    let header = reader.or(fields.get("header"), "authorization".to_owned(), |reader, node| {
        reader.parsed(node, header_name)
    });
    let issuer = fields.get("issuer").and_then(|node| reader.word(node)).map(str::to_owned);
    let mut audience = Vec::new();
    if let Some(node) = fields.get("audience") {
        audience = reader.some(node, "write as in `audience: my-service`");
    }
    let audience = audience.into_iter().filter_map(|node| reader.word(node)).map(str::to_owned).collect();
    let mut algorithms = Vec::new();
    if let Some(node) = fields.get("algorithms") {
        for node in reader.some(node, "write as in `algorithms: [RS256]`") {
            algorithms.extend(reader.parsed(node, signature));
        }
    }
    Some(Jwt { keys: keys?, header, issuer, audience, algorithms })
}

fn signature(word: &str) -> Result<String, ValueError> {
    if words::SIGNATURES.contains(&word) {
        return Ok(word.to_owned());
    }
    let choice = format!("Algorithms: {}", listed(&words::SIGNATURES));
    Err(ValueError {
        message: match word {
            "none" => "unsigned tokens cannot be verified".to_owned(),
            word => format!("unknown signature algorithm {}", quoted(word)),
        },
        help: known_help(word, &words::SIGNATURES, &choice),
    })
}
