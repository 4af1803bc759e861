//! Tests of the container as others use it, by theme.

mod damage;
mod fault;
mod golden;
mod raw;
mod refusals;
mod round_trip;
mod shards;
mod writing;
