//! What the engine owes a backend whose ops are done some time after they were submitted, and may fail until then.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use strata_backend::{
    Backend, BackendError, Buffer, Build, Checkpoint, Counters, Fence, Op, SeqSlot, Span, Spec, WeightData,
};
use strata_cpu::Cpu;
use strata_engine::{Engine, EngineConfig, Event, Reason, Request, Sampling, Wants};
use strata_plan::{Arena, Plan};
use strata_residency::{ExpertStore, LayerSource};
use strata_testkit::faulty::{Faults, Faulty};
use strata_testkit::golden::{self, Npz};

use crate::rig::{Rig, bits, logits};

/// What a device is asked to do, and when it fails.
#[derive(Default)]
struct Log {
    /// Ops submitted, and those known to be done.
    ops: [AtomicU64; 2],
    /// The most that were submitted and not known to be done.
    most: AtomicU64,
    /// The op after which waiting fails; none is 0.
    fails: AtomicU64,
    /// Steps begun and not ended.
    steps: AtomicU64,
    commits: Mutex<Vec<(u64, u64)>>,
}

/// The CPU, which says nothing of an op before it is waited for.
struct Late<T>(T, Arc<Log>);

impl Build for Late<Cpu> {
    type Described = <Cpu as Build>::Described;

    fn describe(
        &self,
        spec: &Spec,
        weights: &[WeightData],
        experts: &[(u16, LayerSource)],
        plan: &mut Plan,
    ) -> Result<Self::Described, BackendError> {
        self.0.describe(spec, weights, experts, plan)
    }

    fn build(
        self,
        spec: Spec,
        described: Self::Described,
        arena: Arena,
        weights: Vec<WeightData>,
        store: Arc<ExpertStore>,
    ) -> Result<Box<dyn Backend>, BackendError> {
        Ok(Box::new(Late(self.0.build(spec, described, arena, weights, store)?, self.1)))
    }
}

impl Backend for Late<Box<dyn Backend>> {
    fn name(&self) -> String {
        self.0.name()
    }

    fn begin_step(&mut self) {
        assert_eq!(self.1.steps.fetch_add(1, SeqCst), 0, "a step in a step");
        self.0.begin_step();
    }

    fn end_step(&mut self) {
        assert_eq!(self.1.steps.fetch_sub(1, SeqCst), 1, "a step that was not begun");
        self.0.end_step();
    }

    fn submit(&mut self, op: &Op<'_>) -> Result<(), BackendError> {
        assert_eq!(self.1.steps.load(SeqCst), 1, "an op outside a step");
        self.0.submit(op)?;
        let [submitted, done] = &self.1.ops;
        let ahead = submitted.fetch_add(1, SeqCst) + 1 - done.load(SeqCst);
        self.1.most.fetch_max(ahead, SeqCst);
        Ok(())
    }

    fn fence(&mut self) -> Result<Fence, BackendError> {
        Ok(Fence(self.1.ops[0].load(SeqCst)))
    }

    fn wait(&mut self, fence: Fence) -> Result<(), BackendError> {
        let fails = self.1.fails.load(SeqCst);
        if fails > 0 && fence.0 >= fails {
            return Err(BackendError::Device { device: "late".into(), reason: "it fell off".into() });
        }
        self.1.ops[1].fetch_max(fence.0, SeqCst);
        Ok(())
    }

    fn read(&mut self, buffer: Buffer, first: usize, out: &mut [f32]) -> Result<(), BackendError> {
        let all = self.fence()?;
        self.wait(all)?;
        self.0.read(buffer, first, out)
    }

    fn commit(&mut self, spans: &[Span]) -> Result<(), BackendError> {
        let [submitted, done] = [0, 1].map(|i| self.1.ops[i].load(SeqCst));
        self.1.commits.lock().unwrap().push((submitted, done));
        self.0.commit(spans)
    }

    fn clear(&mut self, slot: SeqSlot) -> Result<(), BackendError> {
        self.0.clear(slot)
    }

    fn fork(&mut self, from: SeqSlot, to: SeqSlot, tokens: usize) -> Result<(), BackendError> {
        self.0.fork(from, to, tokens)
    }

    fn restore(&mut self, from: Checkpoint, slot: SeqSlot) -> Result<(), BackendError> {
        self.0.restore(from, slot)
    }

    fn export(&mut self, slot: SeqSlot, tokens: usize, out: &mut Vec<u8>) -> Result<(), BackendError> {
        self.0.export(slot, tokens, out)
    }

    fn import(&mut self, slot: SeqSlot, tokens: usize, bytes: &[u8]) -> Result<(), BackendError> {
        self.0.import(slot, tokens, bytes)
    }

    fn take_counters(&mut self) -> Counters {
        self.0.take_counters()
    }
}

fn late() -> (Engine, Arc<Log>, Vec<u32>) {
    let log = Arc::new(Log::default());
    let config =
        EngineConfig { window: Some(16), context: Some(256), sequences: 2, ..EngineConfig::default() };
    let path = golden::dir().join("tiny/tiny.gguf");
    let engine = Rig { config, ..Rig::default() }.load(&path, |cpu| Late(cpu, Arc::clone(&log))).unwrap();
    (engine, log, Npz::golden("tiny/ref.npz").ids("ids"))
}

/// Oracle: the contract. What is committed was waited for; and between layers at most two are on their way, or whoever
/// pauses a prompt there would find all of it submitted.
#[test]
fn windows_are_waited_for() {
    let (mut engine, log, ids) = late();
    let [one, two] = [0; 2].map(|_| engine.open().unwrap());
    logits(&mut engine, one, &ids, Wants::Nothing);
    let mut answer = |tokens| {
        let request =
            Request { max_tokens: Some(tokens), ..Request::new(ids.clone(), Sampling::greedy(), &[]) };
        engine.submit(two, request).unwrap();
        while engine.is_busy() {
            engine.step();
        }
    };
    answer(0);
    let most = log.most.load(SeqCst);
    answer(5);
    let commits = log.commits.lock().unwrap().clone();
    assert!(commits.len() > 8 && commits.iter().all(|(submitted, done)| submitted == done), "{commits:?}");
    let window = commits[1].0 - commits[0].0;
    let layers = engine.model().hyper.layers.len() as u64;
    // The embedding and the n-gram block come on top of the first layers' ops.
    assert!(layers > 3 && most <= 2 * window / layers + 2, "{most} of {window} ops on their way");
}

/// Oracle: the sequence before the window, bit for bit. A device that fails under a prompt without logits changes nothing.
#[test]
fn what_a_device_fails_to_compute_is_not_committed() {
    let (mut engine, log, ids) = late();
    let [seq, twin] = [0; 2].map(|_| engine.open().unwrap());
    for s in [seq, twin] {
        logits(&mut engine, s, &ids[..16], Wants::Nothing);
    }
    let [before, now] = [0, 1].map(|i| log.commits.lock().unwrap()[i].0);
    // With the last op of the next window.
    log.fails.store(now + (now - before), SeqCst);
    let failed = engine.forward(seq, &ids[16..32], Wants::Nothing, &mut |_, _| ()).unwrap_err().to_string();
    assert_eq!(failed, "late: it fell off");
    engine.submit(seq, Request::new(ids[16..32].to_vec(), Sampling::greedy(), &[])).unwrap();
    let ends = engine.step();
    assert!(
        matches!(&ends[..], [Event::Done { reason: Reason::Failed(why), .. }] if *why == failed),
        "{ends:?}"
    );
    assert_eq!(engine.tokens(seq).unwrap(), &ids[..16]);
    log.fails.store(0, SeqCst);
    let [got, want] = [seq, twin].map(|s| bits(&logits(&mut engine, s, &ids[16..32], Wants::All)));
    assert!(got == want);
}

/// Oracle: the contract of requests. Whatever op fails, once or for good, every request ends, those it hit with the backend's sentence; what the
/// sequences hold is whole windows, and they go on from there when the device does.
#[test]
fn whatever_op_fails_every_request_ends() {
    let ids = Npz::golden("tiny/ref.npz").ids("ids");
    let faults = Arc::new(Faults::default());
    let config =
        EngineConfig { window: Some(16), context: Some(256), sequences: 3, ..EngineConfig::default() };
    let path = golden::dir().join("tiny/tiny.gguf");
    let rig = Rig { config, ..Rig::default() };
    let mut engine = rig.load(&path, |cpu| Faulty(cpu, Arc::clone(&faults))).unwrap();
    let twin = engine.open().unwrap();
    let want = logits(&mut engine, twin, &ids, Wants::All);
    // The ops of an undisturbed run, and some more.
    for (after, lasting) in (0..400).step_by(9).flat_map(|after| [(after, false), (after, true)]) {
        let seqs = [0; 2].map(|_| engine.open().unwrap());
        for (seq, prompt) in seqs.iter().zip([&ids[..40], &ids[..3]]) {
            let request =
                Request { max_tokens: Some(5), ..Request::new(prompt.to_vec(), Sampling::greedy(), &[]) };
            engine.submit(*seq, request).unwrap();
        }
        faults.fail_after(after, lasting);
        let (mut ends, mut steps, mut failed) = (0, 0, 0);
        while engine.is_busy() {
            steps += 1;
            assert!(steps < 100, "op {after}: the requests don't end");
            for event in engine.step() {
                if let Event::Done { reason, .. } = event {
                    ends += 1;
                    if let Reason::Failed(why) = reason {
                        assert_eq!(why, "faulty: it fell off");
                        failed += 1;
                    }
                }
            }
        }
        assert!(ends == 2 && (failed > 0 || after > 250), "op {after}: {ends} ends, {failed} of them failed");
        faults.heal();
        for (seq, prompt) in seqs.into_iter().zip([&ids[..40], &ids[..3]]) {
            let held = engine.tokens(seq).unwrap().to_vec();
            if held.len() < prompt.len() {
                assert_eq!(held[..], prompt[..held.len()]);
                let got = logits(&mut engine, seq, &ids[held.len()..], Wants::All);
                assert!(bits(&got) == bits(&want[held.len()..]), "op {after}");
            }
            engine.close(seq).unwrap();
        }
    }
}
