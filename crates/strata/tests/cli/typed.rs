//! A conversation that somebody types, in a terminal.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};

use crate::interrupt::send;
use crate::program::{ENDLESS, Place, pebble, wait_for_thread, with_template};

/// A program in a terminal of its own.
struct Terminal {
    screen: File,
    inside: OwnedFd,
    child: Child,
    seen: String,
}

impl Terminal {
    fn start(place: &Place, args: &[&str]) -> Terminal {
        let screen = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&screen).unwrap();
        unlockpt(&screen).unwrap();
        let name = ptsname(&screen, Vec::new()).unwrap();
        let inside = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let end = || Stdio::from(inside.try_clone().unwrap());
        let child = place.command(args).stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        Terminal { screen: File::from(screen), inside: inside.into(), child, seen: String::new() }
    }

    /// Waits for a text behind what was waited for before.
    fn see(&mut self, text: &str) {
        while !self.seen.contains(text) {
            let mut bytes = [0; 4096];
            let read = self.screen.read(&mut bytes).unwrap();
            self.seen += &String::from_utf8_lossy(&bytes[..read]);
        }
        let end = self.seen.find(text).unwrap() + text.len();
        self.seen.drain(..end);
    }

    fn type_in(&mut self, text: &str) {
        self.screen.write_all(text.as_bytes()).unwrap();
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.inside).unwrap().local_modes.contains(LocalModes::ICANON)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Oracle: the terminal before, and the documented exit codes, in the middle of a line.
#[test]
fn the_terminal_becomes_what_it_was() {
    for (signal, code) in [("-TERM", 143), ("-HUP", 129)] {
        let place = Place::new();
        let mut terminal = Terminal::start(&place, &["run", &pebble()]);
        assert!(!terminal.is_raw());
        terminal.see("> ");
        terminal.type_in("a line that is never");
        terminal.see("never");
        assert!(terminal.is_raw());
        send(&terminal.child, signal);
        assert_eq!(terminal.child.wait().unwrap().code(), Some(code));
        assert!(!terminal.is_raw());
    }
}

/// Oracle: the next prompt: a template that refuses ends an answer and not the conversation.
#[test]
fn a_template_that_refuses_ends_the_answer() {
    let place = Place::new();
    let model = with_template(&place, "{{ raise_exception('not today') }}");
    let mut terminal = Terminal::start(&place, &["run", &model]);
    for question in ["one", "two"] {
        terminal.see("> ");
        terminal.type_in(question);
        terminal.type_in("\r");
        terminal.see("template.gguf");
        terminal.see("not today");
    }
    terminal.see("> ");
    terminal.type_in("\x04");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
}

/// Oracle: what a command says at the next prompt, though the template never ends.
#[test]
fn an_interrupted_template_ends_the_answer() {
    let place = Place::new();
    let model = with_template(&place, ENDLESS);
    let mut terminal = Terminal::start(&place, &["run", &model]);
    terminal.see("> ");
    terminal.type_in("one\r");
    wait_for_thread(&mut terminal.child, "template");
    send(&terminal.child, "-INT");
    terminal.type_in("/help\r");
    terminal.see("/reset");
    // A Ctrl-D that comes while lines are the terminal's own business arrives as a zero.
    terminal.see("> ");
    terminal.type_in("\x04");
    assert_eq!(terminal.child.wait().unwrap().code(), Some(0));
}
