//! A proxy that cuts connections at message boundaries of PostgreSQL's protocol.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// The proxy. It forwards whole messages, and counts them in both directions.
#[derive(Clone)]
pub(crate) struct Proxy {
    pub(crate) port: u16,
    /// Messages until the next cut; below zero: no cut.
    left: Arc<AtomicI64>,
    /// Messages between cuts; zero: one cut only.
    every: i64,
    pub(crate) cuts: Arc<AtomicU64>,
    /// Frontend and backend messages are counted one after the other.
    turn: Arc<Mutex<()>>,
}

impl Proxy {
    /// Cuts once, after `first` messages, or then again after every `every` further ones.
    pub(crate) fn start(server: u16, first: i64, every: i64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let left = Arc::new(AtomicI64::new(first));
        let proxy = Self { port, left, every, cuts: Arc::default(), turn: Arc::default() };
        let own = proxy.clone();
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { continue };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let (up, down) = (own.clone(), own.clone());
                let ends = (client.try_clone().unwrap(), server.try_clone().unwrap());
                // The first message of a client has no type.
                std::thread::spawn(move || up.forward(client, server, false));
                std::thread::spawn(move || down.forward(ends.1, ends.0, true));
            }
        });
        proxy
    }

    pub(crate) fn was_cut(&self) -> bool {
        self.cuts.load(Ordering::SeqCst) > 0
    }

    fn forward(&self, mut from: TcpStream, mut to: TcpStream, mut typed: bool) {
        while let Ok(message) = message(&mut from, typed) {
            typed = true;
            let _turn = self.turn.lock().unwrap();
            if to.write_all(&message).is_err() {
                break;
            }
            if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
                self.cuts.fetch_add(1, Ordering::SeqCst);
                if self.every > 0 {
                    self.left.store(self.every, Ordering::SeqCst);
                }
                break;
            }
        }
        for end in [from, to] {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

fn message(from: &mut TcpStream, typed: bool) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; if typed { 5 } else { 4 }];
    from.read_exact(&mut bytes)?;
    let length = u32::from_be_bytes(bytes[bytes.len() - 4..].try_into().unwrap()) as usize;
    let head = bytes.len();
    bytes.resize(head + length.saturating_sub(4), 0);
    from.read_exact(&mut bytes[head..])?;
    Ok(bytes)
}
