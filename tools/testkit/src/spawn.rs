//! Starting programs that cannot outlive the test.
//!
//! A server that is dropped is killed, but a test program that is itself killed drops nothing. So
//! every server asks the kernel to be killed with its parent. For the kernel the parent is the
//! *thread* that started it, and tests run in threads that come and go; therefore one thread that
//! lives as long as the program starts them all.

use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, mpsc};
use std::thread;

type Order = (Command, mpsc::Sender<io::Result<Child>>);

/// Starts `program` so that it dies with this process, also if this process is killed. `configure`
/// adds its arguments.
pub fn spawn(program: &Path, configure: impl FnOnce(&mut Command)) -> io::Result<Child> {
    let mut command = if has_setpriv() {
        // setpriv becomes the program, so the child's id is the program's.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program);
        command
    } else {
        Command::new(program)
    };
    configure(&mut command);
    let (sender, receiver) = mpsc::channel();
    let starter = starter().lock().expect("nothing panics while it is held");
    starter.send((command, sender)).expect("the thread lives as long as the program");
    drop(starter);
    receiver.recv().expect("the thread lives as long as the program")
}

fn starter() -> &'static Mutex<mpsc::Sender<Order>> {
    static STARTER: OnceLock<Mutex<mpsc::Sender<Order>>> = OnceLock::new();
    STARTER.get_or_init(|| {
        let (sender, receiver) = mpsc::channel::<Order>();
        let run = move || {
            for (mut command, answer) in receiver {
                // The caller has given up: then no process owns the child, and it must not
                // stay.
                if let Err(mpsc::SendError(Ok(mut child))) = answer.send(command.spawn()) {
                    let _ = child.kill().and_then(|()| child.wait());
                }
            }
        };
        thread::Builder::new()
            .name("starts servers".into())
            .spawn(run)
            .expect("a thread can be started");
        Mutex::new(sender)
    })
}

/// Part of util-linux, so of every Debian. Without it, only an aborted test program leaves servers
/// behind.
fn has_setpriv() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let mut probe = Command::new("setpriv");
        probe
            .args(["--pdeathsig", "KILL", "--", "true"])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    })
}
