//! Downloads a model into the cache: what is missing, each file from where it stopped.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::Progress;
use crate::cache::{Snapshot, make_parent, temporary, write};
use crate::error::HubError;
use crate::http::{Client, Remote, Trouble};
use crate::id::{ModelId, is_word};
use crate::settings::Hub;

/// The files of a model beside its weights.
const SMALL: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    model::WEIGHTS_INDEX,
];
/// Bytes of one read.
const BLOCK: usize = 1 << 18;
/// Between two looks at a lock.
const LOOK: Duration = Duration::from_millis(200);
/// Longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// One download.
struct Download<'a> {
    hub: &'a Hub,
    id: &'a ModelId,
    client: Client<'a>,
    progress: &'a mut dyn FnMut(Progress),
}

impl Hub {
    /// Downloads what the cache lacks of a model. The weights come last, after the configuration was found to be that of
    /// a supported model and the disk to have room for them.
    ///
    /// # Errors
    /// If the Hub cannot be reached or refuses, or if what it sends is not what it announced; what arrived is kept.
    pub fn download(
        &self,
        id: &ModelId,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Snapshot, HubError> {
        if self.offline {
            let why = "HF_HUB_OFFLINE forbids downloads";
            return Err(HubError::unreachable(self, id, why));
        }
        let client = Client::new(self, id)?;
        Download { hub: self, id, client, progress }.run()
    }
}

impl Download<'_> {
    fn run(&mut self) -> Result<Snapshot, HubError> {
        let (commit, files) = self.again(|this| this.client.list())?;
        let dir = self.hub.snapshot(self.id, &commit);
        let has = |name: &str| files.iter().any(|file| file == name);
        let unsupported = |why: String| HubError::Unsupported { id: self.id.to_string(), why };
        let single = has(model::WEIGHTS);
        if !has("config.json") {
            return Err(unsupported("it has no config.json".into()));
        }
        if !single && !has(model::WEIGHTS_INDEX) {
            return Err(unsupported("it has no *.safetensors in the form of transformers".into()));
        }
        for name in SMALL.into_iter().filter(|&name| !(single && name == model::WEIGHTS_INDEX)) {
            if has(name) {
                let remote = self.again(|this| this.client.head(&commit, name))?;
                self.fetch(&commit, name, &remote)?;
            } else {
                write(&self.hub.absent(self.id, &commit, name), "")?;
            }
        }
        let id = self.id.to_string();
        model::import_shape(&dir)
            .map_err(|error| HubError::Unsupported { id, why: error.to_string() })?;
        self.weights(&commit, &dir)?;
        // Last, so that other clients find the revision only when it is whole.
        if commit != self.id.revision() {
            write(&self.hub.reference(self.id), &commit)?;
        }
        Ok(Snapshot { dir, whole: true })
    }

    /// Fetches the weights that the snapshot lacks.
    fn weights(&mut self, commit: &str, dir: &Path) -> Result<(), HubError> {
        let mut missing = Vec::new();
        for name in model::missing_weights(dir)? {
            if !is_word(&name) {
                let why = format!("{name:?} is no plain name of a file");
                return Err(HubError::Unsupported { id: self.id.to_string(), why });
            }
            let remote = self.again(|this| this.client.head(commit, &name))?;
            missing.push((name, remote));
        }
        let bytes = |(_, remote): &(String, Remote)| {
            let have = |path: PathBuf| path.metadata().map_or(0, |data| data.len());
            remote.bytes.saturating_sub(have(self.incomplete(remote)).max(have(self.blob(remote))))
        };
        let needed: u64 = missing.iter().map(bytes).sum();
        if let Ok(disk) = rustix::fs::statvfs(&self.hub.cache) {
            let free = disk.f_bavail.saturating_mul(disk.f_frsize);
            if needed > free {
                let (id, cache) = (self.id.to_string(), self.hub.cache.clone());
                return Err(HubError::NoSpace { id, cache, needed, free });
            }
        }
        for (name, remote) in &missing {
            self.fetch(commit, name, remote)?;
        }
        Ok(())
    }

    fn blob(&self, remote: &Remote) -> PathBuf {
        self.hub.repo(self.id).join("blobs").join(&remote.etag)
    }

    fn incomplete(&self, remote: &Remote) -> PathBuf {
        self.hub.repo(self.id).join("blobs").join(format!("{}.incomplete", remote.etag))
    }

    /// Repeats a request that may succeed next time.
    fn again<T>(
        &mut self,
        mut request: impl FnMut(&mut Self) -> Result<T, Trouble>,
    ) -> Result<T, HubError> {
        let mut failures = 0;
        loop {
            match request(self) {
                Ok(answer) => return Ok(answer),
                Err(Trouble::Final(error)) => return Err(error),
                Err(Trouble::Passing(why, pause)) => self.pause(&mut failures, why, pause)?,
            }
        }
    }

    /// Waits before the next attempt, or gives up.
    fn pause(
        &mut self,
        failures: &mut u32,
        why: String,
        asked: Option<Duration>,
    ) -> Result<(), HubError> {
        *failures += 1;
        let limits = self.hub.limits;
        if *failures >= limits.attempts {
            let why = format!("{} cannot be reached ({why})", self.hub.endpoint);
            return Err(HubError::unreachable(self.hub, self.id, why));
        }
        (self.progress)(Progress::Again(why));
        let pause = limits.pause.saturating_mul(1 << (*failures - 1).min(16));
        std::thread::sleep(asked.unwrap_or(pause).min(PAUSE_MAX));
        Ok(())
    }

    /// Puts a file into the snapshot: its blob, and a link to it.
    fn fetch(&mut self, commit: &str, file: &str, remote: &Remote) -> Result<(), HubError> {
        let blob = self.blob(remote);
        make_parent(&blob)?;
        if !is_whole(&blob, remote) {
            let _lock = self.lock(file, remote)?;
            // Another process may have fetched it meanwhile.
            if !is_whole(&blob, remote) {
                self.fill(commit, file, remote)?;
            }
        }
        let link = self.hub.snapshot(self.id, commit).join(file);
        make_parent(&link)?;
        let target = Path::new("../../blobs").join(&remote.etag);
        if std::fs::read_link(&link).is_ok_and(|to| to == target) {
            return Ok(());
        }
        let temporary = temporary(&link);
        std::os::unix::fs::symlink(&target, &temporary)
            .and_then(|()| std::fs::rename(&temporary, &link))
            .map_err(HubError::io("link", &link))
    }

    /// Waits for the blob's lock, which is the one that Hugging Face's clients take.
    fn lock(&mut self, file: &str, remote: &Remote) -> Result<File, HubError> {
        let path = self.hub.cache.join(".locks").join(self.id.folder());
        let path = path.join(format!("{}.lock", remote.etag));
        make_parent(&path)?;
        let opened = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let lock = opened.map_err(HubError::io("open", &path))?;
        let part = self.incomplete(remote);
        let (mut seen, mut since) = (0, Instant::now());
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(lock),
                Err(TryLockError::Error(error)) => return Err(HubError::io("lock", &path)(error)),
                Err(TryLockError::WouldBlock) => {}
            }
            let now = part.metadata().map_or(0, |data| data.len());
            if seen != now {
                (seen, since) = (now, Instant::now());
            }
            if since.elapsed() > self.hub.limits.lock {
                let why = "another process holds the lock and makes no progress; end it";
                return Err(HubError::io("lock", &path)(io::Error::other(why)));
            }
            (self.progress)(Progress::Waiting(file.to_owned()));
            std::thread::sleep(LOOK);
        }
    }

    /// Fetches the rest of a blob, checks it and gives it its name.
    fn fill(&mut self, commit: &str, file: &str, remote: &Remote) -> Result<(), HubError> {
        let path = self.incomplete(remote);
        let mut part = Part::open(&path)?;
        if part.bytes > remote.bytes {
            part.restart()?;
        }
        let (name, bytes) = (file.to_owned(), remote.bytes);
        (self.progress)(Progress::File { name, have: part.bytes, bytes });
        let mut failures = 0;
        while part.bytes < remote.bytes {
            let before = part.bytes;
            let taken = self.take(commit, file, remote, &mut part);
            match taken {
                Ok(()) if part.bytes >= remote.bytes => break,
                Err(Trouble::Final(error)) => return Err(error),
                Err(Trouble::Passing(why, pause)) => {
                    if part.bytes > before {
                        failures = 0;
                    }
                    self.pause(&mut failures, why, pause)?;
                }
                Ok(()) => {
                    if part.bytes > before {
                        failures = 0;
                    }
                    self.pause(&mut failures, "the connection was cut".into(), None)?;
                }
            }
        }
        let found = part.finish()?;
        let is_sha = remote.etag.len() == 64 && remote.etag.chars().all(|c| c.is_ascii_hexdigit());
        if is_sha && found != remote.etag.to_lowercase() {
            std::fs::remove_file(&path).map_err(HubError::io("remove", &path))?;
            let why = format!("its SHA-256 is {found}, the Hub announces {}", remote.etag);
            return Err(HubError::Damaged { id: self.id.to_string(), file: file.to_owned(), why });
        }
        let blob = self.blob(remote);
        std::fs::rename(&path, &blob).map_err(HubError::io("rename", &path))?;
        // The name is on the disk only when the folder is.
        let folder = blob.parent().unwrap_or(Path::new("."));
        File::open(folder).and_then(|dir| dir.sync_all()).map_err(HubError::io("sync", folder))
    }

    /// Takes bytes from one answer until it ends.
    fn take(
        &mut self,
        commit: &str,
        file: &str,
        remote: &Remote,
        part: &mut Part,
    ) -> Result<(), Trouble> {
        let (answer, continues) = self.client.bytes(commit, file, part.bytes)?;
        if !continues {
            part.restart().map_err(Trouble::Final)?;
            let (name, bytes) = (file.to_owned(), remote.bytes);
            (self.progress)(Progress::File { name, have: 0, bytes });
        }
        let mut reader = answer.into_body().into_reader();
        let mut block = vec![0; BLOCK];
        while part.bytes < remote.bytes {
            let most = usize::try_from(remote.bytes - part.bytes).unwrap_or(BLOCK).min(BLOCK);
            let read = reader.read(&mut block[..most]);
            let n = read.map_err(|error| Trouble::Passing(error.to_string(), None))?;
            if n == 0 {
                break;
            }
            part.push(&block[..n]).map_err(Trouble::Final)?;
            (self.progress)(Progress::Bytes(n as u64));
        }
        Ok(())
    }
}

fn is_whole(blob: &Path, remote: &Remote) -> bool {
    blob.metadata().is_ok_and(|data| data.is_file() && data.len() == remote.bytes)
}

/// A blob that is not whole yet, with the hash of what is there.
struct Part {
    path: PathBuf,
    file: File,
    hash: Sha256,
    bytes: u64,
}

impl Part {
    fn open(path: &Path) -> Result<Self, HubError> {
        let mut options = OpenOptions::new();
        let opened = options.create(true).truncate(false).read(true).write(true).open(path);
        let mut file = opened.map_err(HubError::io("open", path))?;
        let mut hash = Sha256::new();
        let mut block = vec![0; BLOCK];
        let mut bytes = 0;
        loop {
            match file.read(&mut block).map_err(HubError::io("read", path))? {
                0 => break,
                n => hash.update(&block[..n]),
            }
            bytes = file.stream_position().map_err(HubError::io("read", path))?;
        }
        Ok(Self { path: path.to_path_buf(), file, hash, bytes })
    }

    /// Forgets what is there.
    fn restart(&mut self) -> Result<(), HubError> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.map_err(HubError::io("write", &self.path))?;
        (self.hash, self.bytes) = (Sha256::new(), 0);
        Ok(())
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(HubError::io("write", &self.path))?;
        self.hash.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// The SHA-256 of the contents, which are on the disk then.
    fn finish(self) -> Result<String, HubError> {
        self.file.sync_all().map_err(HubError::io("sync", &self.path))?;
        Ok(self.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}
