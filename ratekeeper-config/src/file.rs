//! A whole file: store, client addresses, responses, limits, domains, gateway and APIs.

use std::time::Duration;

use ratekeeper_rules::client::{Grouping, Source, TrustedProxies};
use ratekeeper_rules::path::{AmbiguousPathPolicy, PathNormalization};
use ratekeeper_rules::response::{DenialResponse, HeaderSet, NameError, PolicyName};
use ratekeeper_rules::rule::{Rules, RulesError};

use crate::apis::{Api, Apis, admin, apis};
use crate::envoy::{Domain, domains};
use crate::error::{known_instead, listed, quoted};
use crate::gateway::{Gateway, Kind, LimitNames, gateway};
use crate::outside::{Environment, Secret};
use crate::quantity::Fault;
use crate::reader::{Entry, Reader};
use crate::rule::{Defaults, Limited, limited};
use crate::slots::Slots;
use crate::store::{Store, store};
use crate::tree::{Node, Typed};
use crate::when::{cidr, header_name};
use crate::{LIMITS_MAX, names, words};

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
    pub answers: Answers,
    /// Verification of tokens whose claims are used in keys and conditions.
    pub jwt: Option<Jwt>,
    /// The rules in file order: those of `limits` first, then those of descriptors.
    pub rules: Rules,
    /// Number of rules that come from `limits`. They precede all others.
    pub named_limits: usize,
    /// The response to a denied request, for each rule.
    pub customs: Vec<DenialResponse>,
    /// The name of each rule in responses.
    pub names: Vec<PolicyName>,
    /// The concurrency limits, in file order.
    pub slots: Vec<Slots>,
    /// The domains of the Envoy API.
    pub domains: Vec<Domain>,
    /// The gateway, if one is configured.
    pub gateway: Option<Gateway>,
    /// The admin listener for metrics and health checks, unless it is off.
    pub admin: Option<Api>,
    /// The APIs.
    pub apis: Apis,
}

/// Responses to clients.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    /// The rate limit headers.
    pub headers: HeaderSet,
    /// Maximum random time added to retry times, in seconds.
    pub jitter_secs: u64,
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

pub(crate) fn document(reader: &mut Reader, node: &Node, outside: &dyn Environment) -> Option<Config> {
    if matches!(node.typed, Typed::Nothing) {
        reader.wrong(node.place, "there is nothing in this file", EXAMPLE);
        return None;
    }
    let fields = reader.fields(node, "the file", names::FILE, EXAMPLE)?;
    let (store, nodes) = store(reader, fields.get("store"), outside);
    let (client, grouping) = client(reader, fields.get("client"));
    let paths = reader.or(fields.get("paths"), usual_paths(), paths);
    (reader.spelling, reader.has_tokens) = (paths, fields.has("jwt"));
    let answers = reader.or(fields.get("responses"), Answers::default(), answers);
    let jwt = fields.get("jwt").and_then(|node| jwt(reader, node, outside));
    let mut limits = Vec::new();
    if let Some(fields) = fields.get("limits").and_then(|node| reader.named(node, "limits", EXAMPLE)) {
        limits = fields.iter().collect();
    }
    if limits.len() > LIMITS_MAX {
        let what = format!("there are {} limits, and a file has at most {LIMITS_MAX}", limits.len());
        let instead = "join limits that differ only in whom they are for: by a `key`, or by `overrides`";
        reader.wrong(fields.entry("limits")?.place, what, instead);
        return None;
    }
    let (mut rules, mut customs, mut policies, mut slots) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut known = Vec::new();
    for entry in limits.iter().copied() {
        let policy = policy_name(reader, entry);
        let kind = match (limited(reader, entry, &Defaults { nodes }, policy.clone()), policy) {
            (Some(Limited::Rule(mut rule, custom)), Some(policy)) => {
                rule.key = rule.key.grouped(grouping);
                rules.push(*rule);
                customs.push(custom);
                policies.push(policy);
                Kind::Rule(rules.len() - 1)
            }
            (Some(Limited::Slots(mut bound)), _) => {
                bound.key = bound.key.grouped(grouping);
                slots.push(bound);
                Kind::Slots(slots.len() - 1)
            }
            _ => Kind::Wrong,
        };
        known.push((entry.name, kind));
    }
    let known = LimitNames::new(&known);
    let named_limits = rules.len();
    let (domains, asked) = domains(reader, fields.get("domains"), named_limits);
    for rule in asked {
        if let Some(entry) = limits.iter().find(|entry| entry.name == rule.name) {
            let what = format!("a descriptor of a domain is called {} already", quoted(entry.name));
            reader.wrong(entry.place, what, "write another name, as in `per-user`");
        }
        customs.push(DenialResponse::default());
        policies.extend(PolicyName::new(&rule.name).ok());
        rules.push(rule);
    }
    let gateway = fields.get("gateway").and_then(|node| gateway(reader, node, &known, outside));
    let apis = apis(reader, fields.get("apis"), &known, outside);
    let admin = admin(reader, fields.get("admin"), outside);
    if !reader.problems.is_empty() {
        return None;
    }
    // Bans and names have been checked where they are read, except the generated names of overrides and bans.
    let wrong = |error: RulesError| {
        let (RulesError::SameName(name) | RulesError::Ban(name, _)) = &error;
        let place = limits.iter().find(|entry| entry.name == name).map_or(node.place, |entry| entry.place);
        reader.wrong(
            place,
            error.to_string(),
            "a ban or an override has that name already; write another, as in `per-user`",
        );
    };
    let rules = Rules::new(rules).map_err(wrong).ok()?;
    Some(Config {
        store: store?,
        client,
        paths,
        answers,
        jwt,
        rules,
        named_limits,
        customs,
        names: policies,
        slots,
        domains,
        gateway,
        admin,
        apis,
    })
}

/// The name of a limit in responses.
fn policy_name(reader: &mut Reader, entry: Entry<'_>) -> Option<PolicyName> {
    let policy = PolicyName::new(entry.name);
    if let Err(error) = &policy {
        let instead = "write letters, digits and dashes, as in `per-user`";
        reader.wrong(entry.place, unfit(entry.name, error), instead);
    }
    policy.ok()
}

/// Describes why a name cannot be used in responses.
fn unfit(name: &str, error: &NameError) -> String {
    match error {
        NameError::Empty => "this limit has an empty name".to_owned(),
        NameError::TooLong(length) => {
            format!(
                "the name {} has {length} characters, and {} are the most",
                quoted(name),
                PolicyName::LENGTH_MAX
            )
        }
        _ => format!("the name {} cannot be told in a header, which is plain ASCII", quoted(name)),
    }
}

fn client(reader: &mut Reader, node: Option<&Node>) -> (TrustedProxies, Grouping) {
    let example = "write as in `client: { trusted_proxies: [10.0.0.0/8], source: x_forwarded_for }`";
    let fields = node.and_then(|node| reader.fields(node, "client", names::CLIENT, example));
    let Some(fields) = fields else {
        // The error has been recorded. Assume that proxies were listed, so that no further errors follow from it.
        reader.has_proxies = node.is_some();
        return (TrustedProxies::default(), Grouping::default());
    };
    let mut proxies = Vec::new();
    for node in fields.get("trusted_proxies").map_or(Vec::new(), |node| reader.list(node)) {
        let proxy = reader.parsed(node, cidr);
        if proxy.is_some_and(|proxy| proxy.prefix_len() == 0) {
            let what = "whoever trusts everybody lets clients choose their own addresses";
            reader.wrong(node.place, what, "write the networks of your own proxies, as in `10.0.0.0/8`");
        }
        proxies.extend(proxy);
    }
    reader.has_proxies = fields.get("trusted_proxies").is_some_and(|node| !reader.list(node).is_empty());
    if let (false, Some(source)) = (reader.has_proxies, fields.entry("source")) {
        let what = "nobody is trusted, so this header is never read";
        reader.wrong(source.place, what, "write whose word counts, as in `trusted_proxies: [10.0.0.0/8]`");
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

fn paths(reader: &mut Reader, node: &Node) -> Option<PathNormalization> {
    let example = "write as in `paths: { ambiguous: refuse, case: exact, trailing_slash: exact }`";
    let fields = reader.fields(node, "paths", names::PATHS, example)?;
    Some(PathNormalization {
        ambiguous: reader.or(fields.get("ambiguous"), AmbiguousPathPolicy::Reject, |reader, node| {
            reader.choice(node, "value of ambiguous", &words::AMBIGUOUS)
        }),
        ignore_case: reader.or(fields.get("case"), false, |reader, node| {
            reader.choice(node, "value of case", &words::SPELLINGS)
        }),
        ignore_trailing_slash: reader.or(fields.get("trailing_slash"), false, |reader, node| {
            reader.choice(node, "value of trailing_slash", &words::SPELLINGS)
        }),
        ..usual_paths()
    })
}

/// Decodes delimiters as most servers do: `/%40me` is `/@me`, so a limit on one cannot be bypassed with the other.
fn usual_paths() -> PathNormalization {
    PathNormalization { decode_delimiters: true, ..PathNormalization::default() }
}

fn answers(reader: &mut Reader, node: &Node) -> Option<Answers> {
    let example = "write as in `responses: { header_set: ietf, jitter: 5s }`";
    let fields = reader.fields(node, "responses", names::ANSWERS, example)?;
    let known: Vec<&str> = HeaderSet::all().map(HeaderSet::name).collect();
    let headers = reader.or(fields.get("header_set"), HeaderSet::default(), |reader, node| {
        reader.parsed(node, |word| {
            HeaderSet::named(word).ok_or_else(|| Fault {
                what: format!("{} is not a set of headers", quoted(word)),
                instead: known_instead(word, &known, &format!("the sets are {}", listed(&known, "and"))),
            })
        })
    });
    let jitter = reader.or(fields.get("jitter"), Duration::ZERO, |reader, node| {
        let jitter = reader.length(node, "a jitter", Duration::from_secs(1), Duration::from_secs(3_600))?;
        if jitter.subsec_nanos() > 0 {
            let instead = format!("write `{}s` or `{}s`", jitter.as_secs(), jitter.as_secs() + 1);
            reader.wrong(node.place, "clients are told whole seconds, and this is none", instead);
        }
        Some(jitter)
    });
    Some(Answers { headers, jitter_secs: jitter.as_secs() })
}

fn jwt(reader: &mut Reader, node: &Node, outside: &dyn Environment) -> Option<Jwt> {
    let example = "write as in `jwt: { keys: { file: jwks.json }, issuer: https://id.example.com }`";
    let fields = reader.fields(node, "jwt", names::JWT, example)?;
    if !fields.has("keys") {
        reader.wrong(node.place, "there are no keys to verify tokens with", example);
    }
    let keys = fields.get("keys").and_then(|node| {
        let keys = reader.secret(node, "keys", outside)?;
        if !keys.reveal().trim_start().starts_with('{') {
            let instead = "write a file that begins as in `{ \"keys\": [...] }`";
            reader.wrong(node.place, "this is not a JSON Web Key Set", instead);
        }
        Some(keys)
    });
    let header = reader.or(fields.get("header"), "authorization".to_owned(), |reader, node| {
        reader.parsed(node, header_name)
    });
    let issuer = fields.get("issuer").and_then(|node| reader.word(node)).map(str::to_owned);
    let mut audience = Vec::new();
    if let Some(node) = fields.get("audience") {
        audience = reader.some(node, "write for whom, as in `audience: my-service`");
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

fn signature(word: &str) -> Result<String, Fault> {
    if words::SIGNATURES.contains(&word) {
        return Ok(word.to_owned());
    }
    let choice = format!("the algorithms are {}", listed(&words::SIGNATURES, "and"));
    Err(Fault {
        what: match word {
            "none" => "a token that nobody has signed says nothing".to_owned(),
            word => format!("{} is not an algorithm that signs tokens", quoted(word)),
        },
        instead: known_instead(word, &words::SIGNATURES, &choice),
    })
}
