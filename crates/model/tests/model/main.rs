//! What the files under `tests/data` and changed copies of them are understood as.

mod copy;
mod hyper;
mod open;
mod roles;
mod rows;
mod template;
mod tokenizer;
