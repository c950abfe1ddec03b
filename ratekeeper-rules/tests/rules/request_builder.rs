//! A builder for requests in tests.

use std::net::IpAddr;

use ratekeeper_rules::path::{PathNormalization, normalize};

pub(crate) use crate::rules::synthetic_request::SyntheticRequest;

/// `GET /` to `example.com` from 203.0.113.7, as the default.
pub(crate) fn test_request() -> SyntheticRequest {
    SyntheticRequest {
        method: "GET".to_owned(),
        host: "example.com".to_owned(),
        path: "/".to_owned(),
        query: String::new(),
        headers: Vec::new(),
        client: IpAddr::from([203, 0, 113, 7]),
        route: String::new(),
        claims: Vec::new(),
        customs: Vec::new(),
    }
}

impl SyntheticRequest {
    pub(crate) fn with_method(self, method: &str) -> SyntheticRequest {
        SyntheticRequest { method: method.to_owned(), ..self }
    }

    pub(crate) fn for_host(self, host: &str) -> SyntheticRequest {
        SyntheticRequest { host: host.to_owned(), ..self }
    }

    /// Sets path and query.
    pub(crate) fn target(self, target: &str) -> SyntheticRequest {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let path = normalize(path, PathNormalization::default()).unwrap().into_owned();
        SyntheticRequest { path, query: query.to_owned(), ..self }
    }

    pub(crate) fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> SyntheticRequest {
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    pub(crate) fn with_client(self, client: &str) -> SyntheticRequest {
        SyntheticRequest { client: client.parse().unwrap(), ..self }
    }

    pub(crate) fn on_route(self, route: &str) -> SyntheticRequest {
        SyntheticRequest { route: route.to_owned(), ..self }
    }

    pub(crate) fn claim(mut self, name: &str, value: &str) -> SyntheticRequest {
        self.claims.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn custom(mut self, name: &str, value: &str) -> SyntheticRequest {
        self.customs.push((name.to_owned(), value.to_owned()));
        self
    }
}
