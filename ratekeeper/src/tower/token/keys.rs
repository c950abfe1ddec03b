//! The keys of a key set, each with the algorithms that it supports.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use ring::signature::{
    self, EcdsaVerificationAlgorithm, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey,
};
use serde_json::{Map, Value};

use super::TokensError;

/// A signature algorithm, by its name in RFC 7518 and RFC 8037.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    Hs256,
    Hs384,
    Hs512,
    Rs256,
    Rs384,
    Rs512,
    Ps256,
    Ps384,
    Ps512,
    Es256,
    Es384,
    EdDsa,
}

const NAMES: [(&str, Algorithm); 12] = [
    ("HS256", Algorithm::Hs256),
    ("HS384", Algorithm::Hs384),
    ("HS512", Algorithm::Hs512),
    ("RS256", Algorithm::Rs256),
    ("RS384", Algorithm::Rs384),
    ("RS512", Algorithm::Rs512),
    ("PS256", Algorithm::Ps256),
    ("PS384", Algorithm::Ps384),
    ("PS512", Algorithm::Ps512),
    ("ES256", Algorithm::Es256),
    ("ES384", Algorithm::Es384),
    ("EdDSA", Algorithm::EdDsa),
];

impl Algorithm {
    /// The algorithm of exactly this name; names are case-sensitive.
    pub(super) fn named(name: &str) -> Option<Algorithm> {
        NAMES.iter().find(|(its, _)| *its == name).map(|(_, algorithm)| *algorithm)
    }

    fn hmac(self) -> Option<hmac::Algorithm> {
        match self {
            Algorithm::Hs256 => Some(hmac::HMAC_SHA256),
            Algorithm::Hs384 => Some(hmac::HMAC_SHA384),
            Algorithm::Hs512 => Some(hmac::HMAC_SHA512),
            _ => None,
        }
    }

    fn rsa(self) -> Option<&'static RsaParameters> {
        match self {
            Algorithm::Rs256 => Some(&signature::RSA_PKCS1_2048_8192_SHA256),
            Algorithm::Rs384 => Some(&signature::RSA_PKCS1_2048_8192_SHA384),
            Algorithm::Rs512 => Some(&signature::RSA_PKCS1_2048_8192_SHA512),
            Algorithm::Ps256 => Some(&signature::RSA_PSS_2048_8192_SHA256),
            Algorithm::Ps384 => Some(&signature::RSA_PSS_2048_8192_SHA384),
            Algorithm::Ps512 => Some(&signature::RSA_PSS_2048_8192_SHA512),
            _ => None,
        }
    }

    fn ecdsa(self) -> Option<&'static EcdsaVerificationAlgorithm> {
        match self {
            Algorithm::Es256 => Some(&signature::ECDSA_P256_SHA256_FIXED),
            Algorithm::Es384 => Some(&signature::ECDSA_P384_SHA384_FIXED),
            _ => None,
        }
    }
}

/// The names of all algorithms.
pub(super) fn known() -> String {
    NAMES.map(|(name, _)| name).join(", ")
}

/// The key material that verifies a signature.
#[derive(Clone)]
enum Material {
    Secret(Vec<u8>),
    Rsa(RsaPublicKeyComponents<Vec<u8>>),
    /// A public point on the algorithm's curve.
    Point(Vec<u8>),
}

/// A key with its supported algorithms.
#[derive(Clone)]
pub(super) struct VerifyingKey {
    kid: Option<String>,
    algorithms: Vec<Algorithm>,
    material: Material,
}

impl VerifyingKey {
    /// The key's ID (`kid`).
    pub(super) fn kid(&self) -> Option<&str> {
        self.kid.as_deref()
    }

    /// Restricts the key to these algorithms; `None` if it supports none of them.
    pub(super) fn only(mut self, algorithms: &[Algorithm]) -> Option<VerifyingKey> {
        self.algorithms.retain(|its| algorithms.contains(its));
        (!self.algorithms.is_empty()).then_some(self)
    }

    /// Whether the signature is valid for this key and an algorithm that the key supports.
    pub(super) fn verifies(&self, algorithm: Algorithm, signed: &[u8], signature: &[u8]) -> bool {
        if !self.algorithms.contains(&algorithm) {
            return false;
        }
        let is_signed = match &self.material {
            Material::Secret(secret) => algorithm
                .hmac()
                .map(|algorithm| hmac::verify(&hmac::Key::new(algorithm, secret), signed, signature)),
            Material::Rsa(key) => algorithm.rsa().map(|parameters| key.verify(parameters, signed, signature)),
            Material::Point(point) => Some(match algorithm.ecdsa() {
                Some(algorithm) => UnparsedPublicKey::new(algorithm, point).verify(signed, signature),
                None => UnparsedPublicKey::new(&signature::ED25519, point).verify(signed, signature),
            }),
        };
        matches!(is_signed, Some(Ok(())))
    }
}

/// Reads the supported signature keys of a key set.
pub(super) fn read(jwks_json: &str) -> Result<Vec<VerifyingKey>, TokensError> {
    // The parser's message would quote the input, which may contain a secret.
    let not = |why: &str| TokensError::NotAKeySet(why.to_owned());
    let set: Value = serde_json::from_str(jwks_json)
        .map_err(|error| not(&format!("line {}, column {} is not JSON", error.line(), error.column())))?;
    let all = set.get("keys").and_then(Value::as_array).ok_or_else(|| not("there is no list `keys`"))?;
    let mut keys = Vec::new();
    for (index, key) in all.iter().enumerate() {
        let wrong = |what| TokensError::Key { number: index + 1, what };
        let key = key.as_object().ok_or_else(|| wrong("is not an object"))?;
        keys.extend(read_one(key).map_err(wrong)?);
    }
    match keys.is_empty() {
        true => Err(TokensError::NoKeys),
        false => Ok(keys),
    }
}

/// Reads one key; `None` if it is not for signatures or of an unsupported type.
fn read_one(key: &Map<String, Value>) -> Result<Option<VerifyingKey>, &'static str> {
    let text = |name: &str| match key.get(name) {
        None => Ok(None),
        Some(value) => value.as_str().map(Some).ok_or("has something else than text where text belongs"),
    };
    let is_for_verifying = |operations: &Vec<Value>| operations.iter().any(|it| it == "verify");
    let operations = key.get("key_ops").and_then(Value::as_array);
    if text("use")?.is_some_and(|usage| usage != "sig") || !operations.is_none_or(is_for_verifying) {
        return Ok(None);
    }
    let bytes = |name: &str| {
        let encoded = text(name)?.ok_or("lacks one of its numbers")?;
        // Some programs write the padding that RFC 7515 omits.
        let decoded = URL_SAFE_NO_PAD.decode(encoded.trim_end_matches('='));
        decoded.map_err(|_| "has a number that is not in base64url")
    };
    let (material, mut algorithms) = match (text("kty")?, text("crv")?) {
        (Some("oct"), _) => secret(bytes("k")?)?,
        (Some("RSA"), _) => rsa(bytes("n")?, bytes("e")?)?,
        (Some("EC"), Some("P-256")) => (point(&bytes("x")?, &bytes("y")?, 32)?, vec![Algorithm::Es256]),
        (Some("EC"), Some("P-384")) => (point(&bytes("x")?, &bytes("y")?, 48)?, vec![Algorithm::Es384]),
        (Some("OKP"), Some("Ed25519")) => {
            let point = Some(bytes("x")?).filter(|point| point.len() == 32).ok_or("has not 32 bytes")?;
            (Material::Point(point), vec![Algorithm::EdDsa])
        }
        (None, _) => return Err("does not say of what kind it is (`kty`)"),
        _ => return Ok(None),
    };
    if let Some(name) = text("alg")? {
        // RFC 9864 names EdDSA by its curve.
        let only = Algorithm::named(if name == "Ed25519" { "EdDSA" } else { name });
        algorithms.retain(|algorithm| Some(*algorithm) == only);
    }
    let kid = text("kid")?.map(str::to_owned);
    Ok((!algorithms.is_empty()).then_some(VerifyingKey { kid, algorithms, material }))
}

/// A secret supports the algorithms whose hash output is not longer than the secret: RFC 7518, section 3.2.
fn secret(secret: Vec<u8>) -> Result<(Material, Vec<Algorithm>), &'static str> {
    let mut algorithms = vec![Algorithm::Hs256, Algorithm::Hs384, Algorithm::Hs512];
    let length = |algorithm: &Algorithm| {
        algorithm.hmac().map_or(usize::MAX, |it: hmac::Algorithm| it.digest_algorithm().output_len())
    };
    algorithms.retain(|algorithm| length(algorithm) <= secret.len());
    if algorithms.is_empty() {
        return Err("is a secret of less than 32 bytes, which can be guessed");
    }
    Ok((Material::Secret(secret), algorithms))
}

fn rsa(n: Vec<u8>, e: Vec<u8>) -> Result<(Material, Vec<Algorithm>), &'static str> {
    let without_zeros = |bytes: Vec<u8>| bytes.into_iter().skip_while(|byte| *byte == 0).collect::<Vec<u8>>();
    let key = RsaPublicKeyComponents { n: without_zeros(n), e: without_zeros(e) };
    if !(256..=1024).contains(&key.n.len()) {
        return Err("is an RSA key of less than 2048 bits, which can be broken, or of more than 8192");
    }
    let algorithms = NAMES.iter().map(|(_, algorithm)| *algorithm);
    Ok((Material::Rsa(key), algorithms.filter(|algorithm| algorithm.rsa().is_some()).collect()))
}

/// Encodes the coordinates as an uncompressed point, as signature verification requires.
fn point(x: &[u8], y: &[u8], length: usize) -> Result<Material, &'static str> {
    match (x.len(), y.len()) == (length, length) {
        true => Ok(Material::Point([&[4], x, y].concat())),
        false => Err("has coordinates that are not of its curve's length"),
    }
}
