//! A PostgreSQL server of the test's own: the distribution's binaries, a data folder of its own, on 127.0.0.1.

#![allow(dead_code, reason = "each test takes what it needs")]

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The longest wait for the server.
const PATIENCE: Duration = Duration::from_secs(30);
/// Who runs the server if the test runs as root, which PostgreSQL refuses: nobody.
const NOBODY: u32 = 65_534;

/// A server, ended with its value.
pub(crate) struct Server {
    folder: tempfile::TempDir,
    bin: PathBuf,
    pub(crate) port: u16,
    process: Option<Child>,
    /// Further environment of the server.
    pub(crate) preload: Option<PathBuf>,
}

/// The folder of the server's binaries.
pub(crate) fn binaries() -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("bin"))
        .filter(|bin| bin.join("initdb").is_file() && bin.join("psql").is_file())
        .collect();
    found.sort();
    found.pop()
}

/// Whether there is no PostgreSQL here, which is an error where AMK_REQUIRE_POSTGRES is 1.
pub(crate) fn is_missing() -> bool {
    let missing = binaries().is_none();
    let required = std::env::var("AMK_REQUIRE_POSTGRES").is_ok_and(|value| value == "1");
    assert!(
        !(missing && required),
        "AMK_REQUIRE_POSTGRES=1 and there is no PostgreSQL: apt-get install postgresql"
    );
    missing
}

/// Runs tests that need a server. Without one they are not run.
pub(crate) fn run(tests: &[(&'static str, fn())]) -> std::process::ExitCode {
    let mut arguments = libtest_mimic::Arguments::from_args();
    let missing = is_missing();
    if missing && !arguments.list {
        tests.iter().for_each(|(name, _)| println!("test {name} ... not run: no PostgreSQL here"));
        return std::process::ExitCode::SUCCESS;
    }
    arguments.test_threads.get_or_insert(1);
    let trial = |&(name, test): &(&'static str, fn())| {
        libtest_mimic::Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    libtest_mimic::run(&arguments, tests.iter().map(trial).collect()).exit_code()
}

pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Server {
    /// A new server, with the roles `owner` and `amk_worker`, whose passwords are their names.
    pub(crate) fn start() -> Self {
        Self::start_with(None)
    }

    pub(crate) fn start_with(preload: Option<PathBuf>) -> Self {
        let bin = binaries().expect("a server");
        let folder = tempfile::tempdir().unwrap();
        let password = folder.path().join("password");
        std::fs::write(&password, "owner\n").unwrap();
        let mut server = Self { folder, bin, port: free_port(), process: None, preload };
        if rustix::process::getuid().is_root() {
            for path in [server.folder.path(), &password] {
                std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
            }
        }
        let mut init = server.command("initdb");
        init.args(["-U", "owner", "-A", "scram-sha-256", "-N", "-E", "UTF8", "--no-locale"]);
        init.arg("--wal-segsize=1").arg("--pwfile").arg(&password);
        let made = init.arg("-D").arg(server.data()).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        server.again();
        server.sql("CREATE ROLE amk_worker LOGIN PASSWORD 'amk_worker'");
        server
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn command(&self, program: &str) -> Command {
        let program = self.bin.join(program);
        let mut command = if rustix::process::getuid().is_root() {
            let mut command = Command::new("setpriv");
            let id = NOBODY.to_string();
            command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        command.current_dir(self.folder.path()).env("LC_ALL", "C").stdin(Stdio::null());
        command
    }

    /// Starts the server again with TLS and without any connection in the clear. Its certificate is for the name
    /// `localhost` only. Returns the files of two root certificates with one name: the one that signed it, and another.
    pub(crate) fn encrypt(&mut self) -> [PathBuf; 2] {
        let made = self.folder.path().join("certificates");
        std::fs::create_dir(&made).unwrap();
        std::fs::write(
            made.join("openssl.cnf"),
            "[req]\ndistinguished_name=name\nx509_extensions=root\n[name]\n[root]\nbasicConstraints=critical,CA:TRUE\n\
             [server]\nbasicConstraints=CA:FALSE\nsubjectAltName=DNS:localhost\n",
        )
        .unwrap();
        let openssl = |arguments: &str| {
            let mut command = Command::new("openssl");
            command.args(arguments.split(' ')).current_dir(&made).stdin(Stdio::null());
            let output = command.output().expect("openssl, on which Debian's PostgreSQL depends");
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "openssl {arguments}: {text}");
        };
        let key = "-config openssl.cnf -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256";
        for root in ["root", "other"] {
            openssl(&format!(
                "req -x509 {key} -days 2 -subj /CN=root -keyout {root}.key -out {root}.pem"
            ));
        }
        openssl(&format!("req {key} -subj /CN=localhost -keyout server.key -out server.csr"));
        openssl(
            "x509 -req -in server.csr -CA root.pem -CAkey root.key -set_serial 1 -days 2 -extfile openssl.cnf \
             -extensions server -out server.crt",
        );
        self.stop_immediately();
        for name in ["server.key", "server.crt"] {
            let place = self.data().join(name);
            std::fs::copy(made.join(name), &place).unwrap();
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            std::fs::set_permissions(&place, mode).unwrap();
            if rustix::process::getuid().is_root() {
                std::os::unix::fs::chown(&place, Some(NOBODY), Some(NOBODY)).unwrap();
            }
        }
        std::fs::write(self.data().join("pg_hba.conf"), "hostssl all all all scram-sha-256\n")
            .unwrap();
        std::fs::write(
            self.data().join("postgresql.auto.conf"),
            "ssl = on\nlog_connections = on\n",
        )
        .unwrap();
        self.again();
        ["root.pem", "other.pem"].map(|name| made.join(name))
    }

    /// Starts the server again, which recovers what was committed.
    pub(crate) fn again(&mut self) {
        let log = self.folder.path().join("log");
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).args(["-p", &self.port.to_string()]);
        let settings = [
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "max_connections=300",
            "min_wal_size=2MB",
            "max_wal_size=32MB",
            "synchronous_commit=on",
            "restart_after_crash=on",
        ];
        for setting in settings {
            command.args(["-c", setting]);
        }
        if let Some(library) = &self.preload {
            command.env("LD_PRELOAD", library);
        }
        let process = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        self.process = Some(process);
        self.wait_until_ready();
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn wait_until_ready(&self) {
        let began = Instant::now();
        while !self.psql("SELECT 1").0 {
            assert!(began.elapsed() < PATIENCE, "no server: {}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// `pg_ctl stop -m immediate`: connections are cut, nothing is written, the next start recovers.
    pub(crate) fn stop_immediately(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        let id = rustix::process::Pid::from_child(&process);
        let _ = rustix::process::kill_process(id, rustix::process::Signal::QUIT);
        let began = Instant::now();
        while process.try_wait().unwrap().is_none() {
            if began.elapsed() > PATIENCE {
                let _ = process.kill();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // Its children may hold the port for a moment.
        while TcpStream::connect(("127.0.0.1", self.port)).is_ok() && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The address of the board for a role.
    pub(crate) fn url(&self, role: &str) -> PathBuf {
        self.url_at(role, self.port)
    }

    /// The same, through another port.
    pub(crate) fn url_at(&self, role: &str, port: u16) -> PathBuf {
        Path::new(&format!("postgres://{role}@127.0.0.1:{port}/postgres?sslmode=disable")).into()
    }

    /// Runs a script as its owner.
    #[track_caller]
    pub(crate) fn sql(&self, script: &str) -> String {
        let (ok, text) = self.psql(script);
        assert!(ok, "{script}: {text}");
        text
    }

    fn psql(&self, script: &str) -> (bool, String) {
        let mut psql = Command::new(self.bin.join("psql"));
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-U", "owner"]);
        psql.args(["-h", "127.0.0.1", "-p", &self.port.to_string(), "-d", "postgres"]);
        psql.env("PGPASSWORD", "owner").env("PGCONNECT_TIMEOUT", "5").stdin(Stdio::null());
        let output = psql.args(["-c", script]).output().unwrap();
        let text = if output.status.success() { output.stdout } else { output.stderr };
        (output.status.success(), String::from_utf8_lossy(&text).trim().to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop_immediately();
    }
}
