//! An engine on the CPU backend, as the binary wires it.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use strata_backend::{Build, KvFormat};
use strata_cpu::Cpu;
use strata_engine::{Engine, EngineConfig, EngineError, Readers, SeqId, Wants};
use strata_model::Model;
use strata_plan::Limits;
use strata_quant::Isa;
use strata_topology::{Role, Topology, spawn};

/// How to run a model.
#[derive(Debug, Clone)]
pub struct Rig {
    pub config: EngineConfig,
    pub threads: usize,
    pub isa: Isa,
}

impl Default for Rig {
    fn default() -> Self {
        Rig { config: EngineConfig::default(), threads: 2, isa: Isa::detect() }
    }
}

impl Rig {
    pub fn open(&self, path: &Path) -> Engine {
        self.load(path, |cpu| cpu).unwrap()
    }

    /// An engine on what `build` makes of the CPU backend.
    pub fn load<B: Build>(&self, path: &Path, build: impl FnOnce(Cpu) -> B) -> Result<Engine, EngineError> {
        let model = Arc::new(Model::open(path).unwrap());
        let topology = Topology::uniform(self.threads);
        let assignment = topology.assign(Some(self.threads)).unwrap();
        let io = assignment.set(Role::Io).clone();
        let builder = build(Cpu::new(assignment, self.isa));
        let limits = Limits { available: 4 << 30, total: 4 << 30, source: "the test".into() };
        let readers =
            Readers { spawn: Box::new(move |name, work| spawn(Role::Io, &io, name, work)), most: 2 };
        Engine::load(model, &self.config, &limits, builder, readers, &mut |_| ControlFlow::Continue(()))
    }
}

/// Tokens for models whose vocabulary means nothing.
pub fn ids() -> Vec<u32> {
    (0..61).map(|i| (i * i * 7 + i * 13 + 5) % 256 + 3).collect()
}

/// The logits of [`ids`] by the trunk and by the draft block, in windows of `window`.
pub fn trunk_and_draft(path: &Path, window: usize, isa: Isa) -> [Vec<Vec<f32>>; 2] {
    let config = EngineConfig {
        window: Some(window),
        context: Some(128),
        kv: KvFormat::F32,
        draft: true,
        sequences: 2,
        ..Default::default()
    };
    let mut engine = Rig { config, isa, threads: 2 }.open(path);
    [Wants::All, Wants::Draft].map(|wants| {
        let seq = engine.open().unwrap();
        logits(&mut engine, seq, &ids(), wants)
    })
}

/// Logits of `tokens` appended to `seq`, row by row.
pub fn logits(engine: &mut Engine, seq: SeqId, tokens: &[u32], wants: Wants) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    engine
        .forward(seq, tokens, wants, &mut |at, row| {
            if wants != Wants::Last {
                assert_eq!(at, rows.len());
            }
            rows.push(row.to_vec());
        })
        .unwrap();
    rows
}

/// The same bits, whatever they mean.
pub fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()
}

/// The index of the largest value, the lower of equal ones.
pub fn argmax(row: &[f32]) -> usize {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best })
}
