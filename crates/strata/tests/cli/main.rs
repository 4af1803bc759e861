//! The program from outside: what it prints, what it leaves behind, how it ends.

mod bad_input;
mod bench;
mod config;
mod eval;
mod inspect;
mod interrupt;
mod logits;
mod plan;
mod program;
mod run;
mod selftest;
mod synth;
mod typed;
