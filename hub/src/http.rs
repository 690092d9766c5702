//! Requests to the Hub: every one has its limits, and redirections are followed only where they may be.

use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

use ureq::http::{HeaderMap, Response};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::error::HubError;
use crate::id::ModelId;
use crate::settings::Hub;

/// Longest list of a model's files.
const LIST_MAX: u64 = 16 << 20;
/// Most redirections of one request.
const REDIRECTS_MAX: u32 = 8;
/// Longest pause that the Hub may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Why a request has no answer.
pub(crate) enum Trouble {
    /// It may succeed if it is repeated, after this pause if the Hub names one.
    Passing(String, Option<Duration>),
    /// It will not.
    Final(HubError),
}

/// A connection to the Hub for one model.
pub(crate) struct Client<'a> {
    hub: &'a Hub,
    id: &'a ModelId,
    agent: Agent,
}

/// The Hub's description of a file.
#[derive(Clone, Debug)]
pub(crate) struct Remote {
    /// The name of its blob: a SHA-256 of the contents, or another id.
    pub(crate) etag: String,
    pub(crate) bytes: u64,
}

impl<'a> Client<'a> {
    pub(crate) fn new(hub: &'a Hub, id: &'a ModelId) -> Result<Self, HubError> {
        let limit = Some(hub.limits.answer);
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(REDIRECTS_MAX)
            .user_agent(concat!("amk/", env!("CARGO_PKG_VERSION")))
            // The lengths that the Hub announces are those of the files themselves.
            .accept_encoding("identity")
            .timeout_resolve(limit)
            .timeout_connect(limit)
            .timeout_send_request(limit)
            .timeout_recv_response(limit)
            .timeout_per_read(limit);
        let config = match &hub.certificates {
            Some(path) => config.tls_config(trusting(path)?),
            None => config,
        };
        Ok(Self { hub, id, agent: config.build().into() })
    }

    /// The model's commit at the id's revision, and the names of its files.
    pub(crate) fn list(&self) -> Result<(String, Vec<String>), Trouble> {
        let revision = self.id.revision().replace('/', "%2F");
        let at = format!("{}/api/models/{}/revision/{revision}", self.hub.endpoint, self.id.repo());
        let mut answer = self.get(&at, None)?;
        let text = answer.body_mut().with_config().limit(LIST_MAX).read_to_string();
        let text = text.map_err(passing)?;
        let read = || {
            let list: serde_json::Value = serde_json::from_str(&text).ok()?;
            let names = list.get("siblings")?.as_array()?.iter();
            let names = names.filter_map(|file| Some(file.get("rfilename")?.as_str()?.to_owned()));
            let commit = list.get("sha")?.as_str().filter(|sha| crate::id::is_word(sha))?;
            Some((commit.to_owned(), names.collect()))
        };
        read().ok_or_else(|| self.odd(&at, "its answer does not name a commit and files"))
    }

    /// The length and the etag of a file.
    pub(crate) fn head(&self, commit: &str, file: &str) -> Result<Remote, Trouble> {
        let mut at = self.address(commit, file);
        for _ in 0..REDIRECTS_MAX {
            // The Hub describes a file in the answer that redirects to where its bytes are, so that one is read.
            let request = self.agent.head(&at).config().max_redirects(0);
            let request = request.max_redirects_will_error(false).build();
            let request = match &self.hub.token {
                Some(token) => request.header("authorization", format!("Bearer {token}")),
                None => request,
            };
            let answer = request.call().map_err(|error| self.failed(&error))?;
            let (status, headers) = (answer.status().as_u16(), answer.headers());
            let elsewhere = text(headers, "location").filter(|to| to.starts_with('/'));
            if let (300..400, Some(to)) = (status, elsewhere) {
                at = format!("{}{to}", origin(&at));
                continue;
            }
            if status >= 400 {
                return Err(self.refused(status, headers, &at));
            }
            let etag = text(headers, "x-linked-etag").or_else(|| text(headers, "etag"));
            let etag = etag.map(plain_etag).filter(|etag| crate::id::is_word(etag));
            let bytes = text(headers, "x-linked-size").or_else(|| text(headers, "content-length"));
            let bytes = bytes.and_then(|bytes| bytes.parse().ok());
            let (Some(etag), Some(bytes)) = (etag, bytes) else {
                return Err(self.odd(&at, "its answer has no etag and length"));
            };
            return Ok(Remote { etag: etag.to_owned(), bytes });
        }
        Err(self.odd(&at, "it redirects again and again"))
    }

    /// The bytes of a file from `from` on; also whether they begin there: a server may send the whole file.
    pub(crate) fn bytes(
        &self,
        commit: &str,
        file: &str,
        from: u64,
    ) -> Result<(Response<Body>, bool), Trouble> {
        let at = self.address(commit, file);
        let answer = self.get(&at, (from > 0).then_some(from))?;
        let part = answer.status().as_u16() == 206;
        let begins = || {
            let range = text(answer.headers(), "content-range")?.strip_prefix("bytes ")?;
            range.split('-').next()?.trim().parse::<u64>().ok()
        };
        if part && begins() != Some(from) {
            return Err(self.odd(&at, "it sends another part than the one that was asked for"));
        }
        Ok((answer, part || from == 0))
    }

    fn address(&self, commit: &str, file: &str) -> String {
        format!("{}/{}/resolve/{commit}/{file}", self.hub.endpoint, self.id.repo())
    }

    fn get(&self, at: &str, from: Option<u64>) -> Result<Response<Body>, Trouble> {
        let mut request = self.agent.get(at);
        if let Some(token) = &self.hub.token {
            // Sent to the Hub only: not to where it redirects.
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if let Some(from) = from {
            request = request.header("range", format!("bytes={from}-"));
        }
        let answer = request.call().map_err(|error| self.failed(&error))?;
        match answer.status().as_u16() {
            200 | 206 => Ok(answer),
            status => Err(self.refused(status, answer.headers(), at)),
        }
    }

    fn refused(&self, status: u16, headers: &HeaderMap, at: &str) -> Trouble {
        let code = text(headers, "x-error-code").unwrap_or_default();
        let (id, repo) = (self.id.to_string(), self.id.repo());
        let error = match (status, code) {
            (_, "GatedRepo") | (403, _) => HubError::Forbidden { id, why: self.gated(repo) },
            (_, "RevisionNotFound") => HubError::Absent {
                id,
                why: format!("the model {repo} has no revision {} on the Hub", self.id.revision()),
            },
            // Without a token the Hub does not tell a model that is private from one that is not there.
            (_, "RepoNotFound") | (401 | 404, _) => {
                let private = match &self.hub.token {
                    None => {
                        "; if it is private, put an access token into HF_TOKEN (https://huggingface.co/settings/tokens)"
                    }
                    Some(_) => ", or your access token does not let you see it",
                };
                HubError::Absent { id, why: format!("no model {repo} on the Hub{private}") }
            }
            (408 | 429 | 500..600, _) => {
                let pause = text(headers, "retry-after").and_then(|text| text.parse().ok());
                let pause = pause.map(|seconds| Duration::from_secs(seconds).min(PAUSE_MAX));
                return Trouble::Passing(format!("the Hub answers {status}"), pause);
            }
            _ => return self.odd(at, &format!("it answers {status}")),
        };
        Trouble::Final(error)
    }

    fn gated(&self, repo: &str) -> String {
        let asked = format!("accept its terms on https://huggingface.co/{repo}");
        match &self.hub.token {
            None => format!(
                "{asked}, make an access token on https://huggingface.co/settings/tokens and put it into HF_TOKEN, or run `hf auth login`"
            ),
            Some(_) => {
                format!(
                    "{asked} with the account of your access token (HF_TOKEN, `hf auth whoami`)"
                )
            }
        }
    }

    /// Why a request failed. A certificate that is not trusted will not be at the next attempt either.
    fn failed(&self, error: &ureq::Error) -> Trouble {
        let text = error.to_string();
        if !text.contains("invalid peer certificate") {
            return passing(text);
        }
        let why = format!(
            "{} is not trusted ({text}; SSL_CERT_FILE names a PEM file with the certificates to trust)",
            self.hub.endpoint
        );
        Trouble::Final(HubError::unreachable(self.hub, self.id, why))
    }

    fn odd(&self, at: &str, what: &str) -> Trouble {
        let why = format!("{} cannot serve it, {what} ({at})", self.hub.endpoint);
        Trouble::Final(HubError::unreachable(self.hub, self.id, why))
    }
}

fn passing(error: impl Display) -> Trouble {
    Trouble::Passing(error.to_string(), None)
}

/// The scheme and the host of an address.
fn origin(at: &str) -> &str {
    let host = at.find("://").map_or(0, |i| i + 3);
    let end = at[host..].find('/').map_or(at.len(), |i| host + i);
    &at[..end]
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// An etag without its quotes.
fn plain_etag(etag: &str) -> &str {
    etag.trim_start_matches("W/").trim_matches('"')
}

/// Trusts the certificates of a file, as behind a proxy of a company.
fn trusting(path: &Path) -> Result<TlsConfig, HubError> {
    let wrong = |why: String| HubError::Certificates { path: path.to_path_buf(), why };
    let pem = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
    let certificates: Vec<_> = parse_pem(&pem)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(wrong("it has no certificate".to_owned()));
    }
    Ok(TlsConfig::builder().root_certs(RootCerts::new_with_certs(&certificates)).build())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_etags_are_taken_apart() {
        assert_eq!(origin("https://h:1/a/b"), "https://h:1");
        assert_eq!(origin("http://h"), "http://h");
        assert_eq!(plain_etag("W/\"ab\""), "ab");
        assert_eq!(plain_etag("\"ab\""), "ab");
    }
}
