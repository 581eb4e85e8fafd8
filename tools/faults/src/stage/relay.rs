//! An address that leads to one server and then to another, as a floating address or a name does.
//! Who was connected is cut off when it moves.

use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

pub(crate) struct Relay {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    target: AtomicU16,
    open: Mutex<Vec<TcpStream>>,
}

impl Relay {
    pub(crate) fn start(target: u16) -> Relay {
        Relay::at("127.0.0.1", 0, target)
    }

    /// The same at a certain address, for a network of its own.
    pub(crate) fn at(address: &str, port: u16, target: u16) -> Relay {
        let listener = TcpListener::bind((address, port)).expect("the port is free");
        let port = listener.local_addr().expect("it is bound").port();
        let shared = Arc::new(Shared { target: AtomicU16::new(target), open: Mutex::default() });
        let own = Arc::clone(&shared);
        // It ends with the program.
        thread::spawn(move || {
            listener.incoming().flatten().for_each(|client| _ = own.connect(client))
        });
        Relay { port, shared }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Leads new connections elsewhere. Open ones stay.
    pub(crate) fn leads_newcomers_to(&self, target: u16) {
        self.shared.target.store(target, Ordering::SeqCst);
    }

    /// Leads all connections elsewhere from now on.
    pub(crate) fn leads_to(&self, target: u16) {
        self.leads_newcomers_to(target);
        let mut open = self.shared.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.drain(..).for_each(|stream| _ = stream.shutdown(Shutdown::Both));
    }
}

impl Shared {
    fn connect(&self, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect((Ipv4Addr::LOCALHOST, self.target.load(Ordering::SeqCst)))?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.extend([client.try_clone()?, server.try_clone()?]);
        drop(open);
        for (mut from, mut to) in [(client.try_clone()?, server.try_clone()?), (server, client)] {
            thread::spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
        Ok(())
    }
}
