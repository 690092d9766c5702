//! Where the Hub and its cache are: the environment variables of Hugging Face's own clients.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// The address of the Hub.
const ENDPOINT: &str = "https://huggingface.co";
/// Longest token; a longer file is none.
const TOKEN_MAX: usize = 4096;

/// The Hub, and its cache on this machine.
#[derive(Clone, Debug)]
pub struct Hub {
    /// The folder of the cache.
    pub cache: PathBuf,
    /// The address of the Hub, without a slash at the end.
    pub endpoint: String,
    /// The user's access token.
    pub token: Option<String>,
    /// Whether the network must not be used.
    pub offline: bool,
    /// Certificates to trust in the place of those in the binary, as a PEM file.
    pub certificates: Option<PathBuf>,
    /// The limits of waiting.
    pub limits: Limits,
}

/// How long a download waits.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For a connection, for the head of an answer and for its body; a body that takes longer is asked for again from
    /// where it stopped.
    pub answer: Duration,
    /// Failures in a row, without a new byte between them, after which a download is given up.
    pub attempts: u32,
    /// Before the second attempt; doubled before each further one.
    pub pause: Duration,
    /// For another process that downloads the same file, without a new byte.
    pub lock: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(60),
            attempts: 5,
            pause: Duration::from_secs(1),
            lock: Duration::from_secs(600),
        }
    }
}

impl Hub {
    /// The Hub of this process's environment; `None` if no variable says where the cache is.
    #[must_use]
    pub fn from_env() -> Option<Self> {
        Self::from_variables(&|name| std::env::var_os(name).filter(|value| !value.is_empty()))
    }

    fn from_variables(get: &dyn Fn(&str) -> Option<OsString>) -> Option<Self> {
        let path = |name: &str| get(name).map(PathBuf::from);
        let text = |name: &str| get(name).and_then(|value| value.into_string().ok());
        let xdg = path("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let base = xdg.or_else(|| path("HOME").map(|home| home.join(".cache")));
        let home = path("HF_HOME").or_else(|| base.map(|base| base.join("huggingface")));
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let cache = cache.or_else(|| home.as_ref().map(|home| home.join("hub")))?;
        let token_file = path("HF_TOKEN_PATH").or_else(|| home.map(|home| home.join("token")));
        let stored = || std::fs::read_to_string(token_file?).ok();
        let token = text("HF_TOKEN").or_else(stored).map(|token| token.trim().to_owned());
        let yes = |value: String| ["1", "ON", "YES", "TRUE"].contains(&&*value.to_uppercase());
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.to_owned());
        Some(Self {
            cache,
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.filter(|token| is_token(token)),
            offline: text("HF_HUB_OFFLINE").is_some_and(yes),
            certificates: path("SSL_CERT_FILE"),
            limits: Limits::default(),
        })
    }
}

/// Whether the text can stand in a header.
fn is_token(text: &str) -> bool {
    !text.is_empty() && text.len() <= TOKEN_MAX && text.chars().all(|c| c.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(variables: &[(&str, &str)]) -> Option<Hub> {
        let of = |name: &str| variables.iter().find(|(n, _)| *n == name);
        Hub::from_variables(&|name| of(name).map(|(_, value)| OsString::from(value)))
    }

    #[test]
    fn the_cache_is_where_the_clients_of_hugging_face_have_it() {
        let cache = |variables| hub(variables).unwrap().cache;
        let base = [("HOME", "/h")];
        assert_eq!(cache(&base), PathBuf::from("/h/.cache/huggingface/hub"));
        let base = [("HOME", "/h"), ("XDG_CACHE_HOME", "/x")];
        assert_eq!(cache(&base), PathBuf::from("/x/huggingface/hub"));
        let base = [("HOME", "/h"), ("HF_HOME", "/f")];
        assert_eq!(cache(&base), PathBuf::from("/f/hub"));
        let base = [("HOME", "/h"), ("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")];
        assert_eq!(cache(&base), PathBuf::from("/c"));
        assert!(hub(&[]).is_none());
    }

    #[test]
    fn the_token_is_a_variable_or_a_file() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        let at = home.path().to_str().unwrap();
        assert_eq!(hub(&[("HF_HOME", at)]).unwrap().token.as_deref(), Some("hf_file"));
        let both = hub(&[("HF_HOME", at), ("HF_TOKEN", "hf_variable")]).unwrap();
        assert_eq!(both.token.as_deref(), Some("hf_variable"));
        let two_lines = hub(&[("HOME", "/h"), ("HF_TOKEN", "a\r\nx: y")]).unwrap();
        assert_eq!(two_lines.token, None);
        let off = hub(&[("HOME", "/h"), ("HF_HUB_OFFLINE", "1"), ("HF_ENDPOINT", "http://m/")]);
        let off = off.unwrap();
        assert!(off.offline && off.endpoint == "http://m" && off.token.is_none());
        assert!(!hub(&[("HOME", "/h"), ("HF_HUB_OFFLINE", "0")]).unwrap().offline);
    }
}
