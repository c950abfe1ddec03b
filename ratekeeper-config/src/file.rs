//! A whole file: store, client addresses, responses, limits, domains, gateway and APIs.

use std::time::Duration;

use ratekeeper_rules::client::{Grouping, Source, TrustedProxies};
use ratekeeper_rules::path::{AmbiguousPathPolicy, PathNormalization};
use ratekeeper_rules::response::{DenialResponse, HeaderSet, NameError, PolicyName};
use ratekeeper_rules::rule::{Rules, RulesError};
use serde_json::{Value, json};

use crate::apis::{ADMIN_FIELD, APIS, Api, Apis, admin, apis};
use crate::concurrency::ConcurrencyLimit;
use crate::environment::{Environment, Secret};
use crate::envoy::{Domain, descriptors, domains};
use crate::error::{Diagnostic, known_help, listed, quoted};
use crate::gateway::{ALL, GATEWAY, Gateway, LimitKind, LimitNames, NONE, gateway};
use crate::quantity::ValueError;
use crate::reader::{Entry, Reader};
use crate::rule::{Defaults, LIMIT, NamedLimit, named_limit};
use crate::store::{STORE, Store, store};
use crate::table::{
    Constraint, Definitions, Field, HeaderName, Kind, ListOf, Mapping, Named, Or, Page, Parsed, SECTION,
    SecretText, Section, Short, TextValue, Time, Typed, WORD, Whole, Words, as_code, hours, network, secs,
    string,
};
use crate::tree::{Node, NodeValue};
use crate::when::{cidr, header_name};
use crate::{LIMITS_MAX, warnings, words};

pub(crate) const EXAMPLE: &str = "write a file as in `limits: { per-user: { key: ip, token_bucket: {} } }`";

pub(crate) static DOCUMENT: Section = Section {
    name: "document",
    meaning: "Configuration of Ratekeeper.",
    example: EXAMPLE,
    fields: &[&[
        &Field::new(
            "store",
            "Where limit state is stored: `memory`, the address of a Redis server, or a mapping.",
            Short(string("`memory` or the address of a Redis server"), &STORE),
        )
        .or("memory"),
        &Field::of(&CLIENT),
        &Field::of(&PATHS),
        &Field::of(&RESPONSES),
        &Field::of(&JWT),
        &Field::new(
            "limits",
            "Limits, by name.",
            Named { names: LIMIT_NAME, value: Mapping(&LIMIT), from: 0, to: LIMITS_MAX, may_be_empty: true },
        ),
        &Field::new(
            "domains",
            "Descriptors of the Envoy API, by domain.",
            Named::any(string("domain").filled(), descriptors()),
        ),
        &Field::of(&GATEWAY),
        &Field::of(&APIS),
        &ADMIN_FIELD,
        &Field::of(&LOG),
    ]],
    ..SECTION
};
const LIMIT_NAME: TextValue =
    string("name").chars(1, PolicyName::LENGTH_MAX).pattern("^[ -~]+$").except(&[ALL, NONE]);

static CLIENT: Section = Section {
    name: "client",
    meaning: "How the IP address of a client is determined.",
    example: "write as in `client: { trusted_proxies: [10.0.0.0/8], source: x_forwarded_for }`",
    fields: &[&[
        &Field::new(
            "trusted_proxies",
            "Addresses and networks of proxies whose forwarding headers are trusted.",
            ListOf::any(network()),
        ),
        &SOURCE,
        &IPV6_PREFIX,
    ]],
    constraints: &[Constraint::Needs("source", "trusted_proxies")],
    ..SECTION
};
const SOURCE: Field<Or<Words<Source>>> =
    Field::new("source", "Header in which trusted proxies pass the client address.", Words(&words::SOURCES))
        .or(Source::XForwardedFor);
const IPV6_PREFIX: Field<Or<Whole>> = Field::new(
    "ipv6_prefix",
    "Length of the IPv6 prefix that counts as one client.",
    Whole { from: *Grouping::IPV6_PREFIXES.start() as u32, to: *Grouping::IPV6_PREFIXES.end() as u32 },
)
.or(Grouping::IPV6_PREFIX as u32);

static PATHS: Section = Section {
    name: "paths",
    meaning: "Path normalization. The upstream receives the normalized path, but letter case, a trailing slash and escaped delimiters as sent.",
    example: "write as in `paths: { ambiguous: reject, case: exact, trailing_slash: ignore }`",
    fields: &[&[&AMBIGUOUS, &CASE, &TRAILING_SLASH]],
    ..SECTION
};
const AMBIGUOUS: Field<Or<Words<AmbiguousPathPolicy>>> = Field::new(
    "ambiguous",
    "Paths that servers interpret differently, for example with `%2f` or backslashes. `reject`: rejected with status 400. `keep`: kept unchanged.",
    Words(&words::AMBIGUOUS),
)
.or(AmbiguousPathPolicy::Reject);
const CASE: Field<Or<Words<bool>>> = Field::new(
    "case",
    "`exact`: `/Login` and `/login` are different paths. `ignore`: they are the same for routes and limits; the upstream receives the letter case as sent.",
    Words(&words::CASE),
)
.or(false);
const TRAILING_SLASH: Field<Or<Words<bool>>> = Field::new(
    "trailing_slash",
    "`ignore`: `/a/` and `/a` are the same path for routes and limits; the upstream receives the trailing slash as sent. `exact`: they are different.",
    Words(&words::TRAILING_SLASH),
)
.or(true);

static RESPONSES: Section = Section {
    name: "responses",
    meaning: "Responses to clients.",
    example: "write as in `responses: { header_set: ietf, jitter: 5s }`",
    fields: &[&[&HEADER_SET, &JITTER]],
    ..SECTION
};
const HEADER_SET: Field<Or<HeaderSetName>> =
    Field::new("header_set", "Rate limit headers of responses.", HeaderSetName).or(HeaderSet::IETF);
const JITTER: Field<Time> = Field::new(
    "jitter",
    "Maximum random time added to retry times, in whole seconds.",
    Time { subject: "a jitter", from: secs(1), to: hours(1) },
)
.otherwise("no jitter");

static JWT: Section = Section {
    name: "jwt",
    meaning: "Verification of JSON Web Tokens.",
    example: "write as in `jwt: { keys: { file: jwks.json }, issuer: https://id.example.com }`",
    fields: &[&[
        &Field::new("keys", "JSON Web Key Set.", SecretText).required(),
        &TOKEN_HEADER,
        &Field::new("issuer", "Required issuer (`iss`).", WORD).otherwise("any"),
        &Field::new("audience", "Accepted audiences (`aud`).", ListOf::some(WORD)).otherwise("any"),
        &Field::new("algorithms", "Accepted signature algorithms.", ListOf::some(SIGNATURE))
            .otherwise("those of the keys"),
    ]],
    ..SECTION
};
const TOKEN_HEADER: Field<Or<HeaderName>> =
    Field::new("header", "Header that contains the token.", HeaderName).or("Authorization");
const SIGNATURE: Words<()> = Words(&words::SIGNATURES);

static LOG: Section = Section {
    name: "log",
    meaning: "The access log.",
    example: "write as in `log: { keys: hash }`",
    fields: &[&[&KEYS]],
    ..SECTION
};
const KEYS: Field<Or<Words<LogKeys>>> = Field::new(
    "keys",
    "How the key of a request appears in the access log. `hash`: as a keyed hash, so that lines of the same key can be found; with a Redis secret, the same hash in all instances. `off`: not at all. `text`: as text.",
    Words(&words::LOG_KEYS),
)
.or(LogKeys::Hash);

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogKeys {
    /// As a keyed hash: lines of the same key can be found, the key cannot be read.
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
    let fields = reader.fields(node, "the file", &DOCUMENT)?;
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
    let log_keys = reader.or(fields.get("log"), KEYS.default(), log_keys);
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
        let is_field = LIMIT.row(entry.name).is_some();
        let NodeValue::Map(fields) = &entry.node.value else { return is_field };
        let is_limit =
            |name: &Node| matches!(&name.value, NodeValue::Word(word) if LIMIT.row(word).is_some());
        is_field && !fields.iter().any(|(name, _)| is_limit(name))
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
    let fields = node.and_then(|node| reader.fields(node, "`client`", &CLIENT));
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
    let source = SOURCE.read(reader, &fields);
    let bits = u8::try_from(IPV6_PREFIX.read(reader, &fields));
    let grouping = bits.ok().and_then(Grouping::by_ipv6_prefix).unwrap_or_default();
    (TrustedProxies::proxies(proxies).with_source(source), grouping)
}

/// The path normalization, and whether the file says how letter case is compared.
fn paths(reader: &mut Reader, node: &Node) -> Option<(PathNormalization, bool)> {
    let fields = reader.fields(node, "`paths`", &PATHS)?;
    let paths = PathNormalization {
        ambiguous: AMBIGUOUS.read(reader, &fields),
        ignore_case: CASE.read(reader, &fields),
        ignore_trailing_slash: TRAILING_SLASH.read(reader, &fields),
        ..default_paths()
    };
    Some((paths, fields.has("case")))
}

/// Decodes delimiters as most servers do: `/%40me` is `/@me`, so a limit on one cannot be bypassed with the other.
fn default_paths() -> PathNormalization {
    PathNormalization {
        ambiguous: AMBIGUOUS.default(),
        ignore_case: CASE.default(),
        ignore_trailing_slash: TRAILING_SLASH.default(),
        decode_delimiters: true,
    }
}

fn responses(reader: &mut Reader, node: &Node) -> Option<Responses> {
    let fields = reader.fields(node, "`responses`", &RESPONSES)?;
    let headers = HEADER_SET.read(reader, &fields);
    let jitter = reader.or(fields.get("jitter"), Duration::ZERO, |reader, node| {
        let jitter = JITTER.parse(reader, node)?;
        if jitter.subsec_nanos() > 0 {
            let help = format!("write `{}s` or `{}s`", jitter.as_secs(), jitter.as_secs() + 1);
            reader.error(node.position, "`jitter` must be whole seconds, as in `Retry-After`", help);
        }
        Some(jitter)
    });
    Some(Responses { headers, jitter_secs: jitter.as_secs() })
}

/// The name of a header set.
#[derive(Clone, Copy)]
struct HeaderSetName;

impl HeaderSetName {
    fn all() -> Vec<&'static str> {
        HeaderSet::all().map(HeaderSet::name).collect()
    }
}

impl Kind for HeaderSetName {
    fn schema(&self, _: &mut Definitions) -> Value {
        json!({ "enum": HeaderSetName::all() })
    }

    fn text(&self, _: &Page) -> String {
        as_code(HeaderSetName::all())
    }
}

impl Typed for HeaderSetName {
    type Value = HeaderSet;

    fn typed(&self, value: HeaderSet) -> Value {
        json!(value.name())
    }
}

impl Parsed for HeaderSetName {
    fn parse(&self, reader: &mut Reader, node: &Node, _: &str) -> Option<HeaderSet> {
        reader.parsed(node, |word| {
            let known = HeaderSetName::all();
            HeaderSet::named(word).ok_or_else(|| ValueError {
                message: format!("unknown header set {}", quoted(word)),
                help: known_help(word, &known, &format!("Header sets: {}", listed(&known))),
            })
        })
    }
}

fn log_keys(reader: &mut Reader, node: &Node) -> Option<LogKeys> {
    let fields = reader.fields(node, "`log`", &LOG)?;
    Some(KEYS.read(reader, &fields))
}

fn jwt(reader: &mut Reader, node: &Node, environment: &dyn Environment) -> Option<Jwt> {
    let fields = reader.fields(node, "`jwt`", &JWT)?;
    reader.require(&fields);
    let keys = fields.get("keys").and_then(|node| {
        let keys = reader.secret(node, "keys", environment)?;
        if !keys.reveal().trim_start().starts_with('{') {
            let help = "write a file that contains `{ \"keys\": [...] }`";
            reader.error(node.position, "not a JSON Web Key Set", help);
        }
        Some(keys)
    });
    let header = fields.get("header").and_then(|node| reader.parsed(node, header_name));
    let header = header.unwrap_or_else(|| TOKEN_HEADER.default().to_ascii_lowercase());
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
    let known = words::SIGNATURES.map(|(known, ())| known);
    if known.contains(&word) {
        return Ok(word.to_owned());
    }
    let choice = format!("Algorithms: {}", listed(&known));
    Err(ValueError {
        message: match word {
            "none" => "unsigned tokens cannot be verified".to_owned(),
            word => format!("unknown signature algorithm {}", quoted(word)),
        },
        help: known_help(word, &known, &choice),
    })
}
