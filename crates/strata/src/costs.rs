//! Where the time of a round, a prompt or an answer went.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use strata_backend::{Counters, ExpertCount, Family, FileCount, HostCount, LinkCount};
use strata_engine::Engine;

/// The CPU time of all threads so far.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::ProcessCPUTime).try_into().unwrap_or_default()
}

/// Counts what work takes.
pub struct Stopwatch {
    started: Instant,
    cpu: Duration,
}

/// What it took.
#[derive(Debug, Default)]
pub struct Spent {
    /// From start to end.
    pub seconds: f64,
    /// Of all threads' CPU time.
    pub cpu_seconds: f64,
    /// What the backend counted.
    pub counters: Counters,
}

impl Stopwatch {
    /// Starts; the engine's counters start anew.
    pub fn start(engine: &mut Engine) -> Stopwatch {
        engine.take_counters();
        Stopwatch { started: Instant::now(), cpu: cpu_time() }
    }

    /// Since the start.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Ends.
    pub fn stop(&self, engine: &mut Engine) -> Spent {
        let seconds = self.started.elapsed().as_secs_f64();
        let cpu_seconds = cpu_time().saturating_sub(self.cpu).as_secs_f64();
        Spent { seconds, cpu_seconds, counters: engine.take_counters() }
    }
}

impl Spent {
    /// Adds what other work took.
    pub fn merge(&mut self, other: &Spent) {
        self.seconds += other.seconds;
        self.cpu_seconds += other.cpu_seconds;
        self.counters.merge(&other.counters);
    }
}

/// What rounds of some work cost, each on average.
#[derive(Debug, Default, Serialize)]
pub struct Costs {
    /// Weights and state that had to be read at least once.
    pub bytes: f64,
    /// Of all threads' CPU time, and how many CPUs that is at a time.
    cpu_seconds: f64,
    cpus: f64,
    families: Vec<FamilyShare>,
    /// Of a token: how often the device asked the host, for how many experts, and how long it computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<HostShare>,
    link: Option<LinkUse>,
    expert_use: Option<ExpertUse>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expert_reads: Option<ReadUse>,
}

/// A family's part of a round.
#[derive(Debug, Serialize)]
struct FamilyShare {
    family: Family,
    share: f64,
    seconds: f64,
    bytes: f64,
}

/// Routed experts of a round, where some are beside the device.
#[derive(Debug, Serialize)]
struct ExpertUse {
    /// Each once a window.
    used: f64,
    /// Those that were in the device's own memory, and their share.
    resident: f64,
    share: f64,
    /// Experts that came there in place of others.
    exchanged: f64,
}

impl ExpertUse {
    fn new(count: ExpertCount, rounds: f64) -> ExpertUse {
        let [used, resident, exchanged] =
            [count.used, count.resident, count.exchanged].map(|count| count as f64 / rounds);
        ExpertUse { used, resident, share: resident / used.max(1.0), exchanged }
    }
}

/// What the host computed for a device, per token.
#[derive(Debug, Serialize)]
struct HostShare {
    asked: f64,
    experts: f64,
    seconds: f64,
}

impl HostShare {
    fn new(count: HostCount, tokens: f64) -> HostShare {
        let HostCount { asked, experts, nanos } = count;
        HostShare {
            asked: asked as f64 / tokens,
            experts: experts as f64 / tokens,
            seconds: nanos as f64 / 1e9 / tokens,
        }
    }
}

/// Copies of experts ahead of what computes with them, of a round.
#[derive(Debug, Serialize)]
struct LinkUse {
    bytes: f64,
    /// While copies were under way.
    seconds: f64,
    /// The part of the round's time.
    share: f64,
}

impl LinkUse {
    fn new(count: LinkCount, rounds: f64, all: f64) -> LinkUse {
        let seconds = count.nanos as f64 / 1e9;
        LinkUse { bytes: count.bytes as f64 / rounds, seconds: seconds / rounds, share: seconds / all }
    }
}

/// Routed experts of a round, where memory holds a part of them.
#[derive(Debug, Serialize)]
struct ReadUse {
    /// Each once a window.
    used: f64,
    /// Those that were read from the file, and their bytes.
    read: f64,
    bytes: f64,
    /// How long computing waited for them; a device's waiting isn't known.
    waited_seconds: f64,
}

impl ReadUse {
    fn new(count: FileCount, rounds: f64) -> ReadUse {
        let [used, read, bytes, waited] =
            [count.used, count.read, count.bytes, count.waited].map(|count| count as f64 / rounds);
        ReadUse { used, read, bytes, waited_seconds: waited / 1e9 }
    }
}

impl Costs {
    /// Of so many rounds together, of so many tokens each.
    pub fn new(spent: &Spent, rounds: usize, tokens: usize) -> Costs {
        let &Spent { seconds, cpu_seconds, ref counters } = spent;
        let (rounds, all) = (rounds as f64, counters.nanos().max(1) as f64);
        let mut families: Vec<FamilyShare> = Family::ALL
            .into_iter()
            .map(|family| (family, counters.get(family)))
            .filter(|(_, count)| count.calls > 0)
            .map(|(family, count)| FamilyShare {
                family,
                share: count.nanos as f64 / all,
                seconds: count.nanos as f64 / 1e9 / rounds,
                bytes: count.bytes as f64 / rounds,
            })
            .collect();
        families.sort_by(|a, b| b.share.total_cmp(&a.share));
        Costs {
            bytes: counters.bytes() as f64 / rounds,
            cpu_seconds: cpu_seconds / rounds,
            cpus: if seconds > 0.0 { cpu_seconds / seconds } else { 0.0 },
            families,
            host: (counters.host.asked > 0).then(|| HostShare::new(counters.host, rounds * tokens as f64)),
            link: (counters.link.bytes > 0).then(|| LinkUse::new(counters.link, rounds, seconds)),
            expert_use: counters.experts().map(|count| ExpertUse::new(count, rounds)),
            expert_reads: counters.reads().map(|count| ReadUse::new(count, rounds)),
        }
    }

    /// A line for each family of ops, and for what else was counted.
    pub fn as_text(&self) -> String {
        let mut out = String::new();
        for part in &self.families {
            let rate = if part.seconds > 0.0 { part.bytes / part.seconds / 1e9 } else { 0.0 };
            out += &format!(
                "  {:<8} {:>5.1} %  {:>9.3} ms  {:>9.3} MB  {rate:>7.2} GB/s\n",
                part.family.name(),
                100.0 * part.share,
                part.seconds * 1e3,
                part.bytes / 1e6
            );
        }
        out += &format!("  CPU time {:.3} s: {:.2} CPUs at work\n", self.cpu_seconds, self.cpus);
        if let Some(HostShare { asked, experts, seconds }) = self.host {
            out += &format!(
                "  a token: {experts:.1} experts by the CPU, asked for {asked:.1} times, in {:.3} ms\n",
                1e3 * seconds
            );
        }
        if let Some(LinkUse { bytes, seconds, share }) = self.link {
            out += &format!(
                "  experts copied ahead: {:.3} GB, {:.1} % of the time, at {:.2} GB/s\n",
                bytes / 1e9,
                100.0 * share,
                bytes / seconds / 1e9
            );
        }
        if let Some(ExpertUse { used, share, exchanged, .. }) = &self.expert_use {
            out += &format!(
                "  of {used:.0} experts used, {:.1} % were on the device; {exchanged:.0} came there in place of others\n",
                100.0 * share
            );
        }
        if let Some(ReadUse { used, read, bytes, waited_seconds }) = &self.expert_reads {
            out += &format!(
                "  of {used:.0} experts used, {read:.0} ({:.3} GB) were read from the file, and waited for {waited_seconds:.3} s\n",
                bytes / 1e9
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Oracle: by hand. Bytes and times are per round, shares add up to one, what the host did is per token.
    #[test]
    fn costs_are_per_round() {
        let mut spent = Spent { seconds: 3.0, cpu_seconds: 4.5, counters: Counters::default() };
        let counters = &mut spent.counters;
        counters.add(Family::Experts, 3_000_000, 600);
        counters.add(Family::Head, 1_000_000, 200);
        counters.host = HostCount { asked: 40, experts: 60, nanos: 5_000_000 };
        let costs = Costs::new(&spent, 2, 10);
        assert_eq!(costs.bytes, 400.0);
        assert_eq!(costs.families.iter().map(|f| f.share).collect::<Vec<_>>(), [0.75, 0.25]);
        assert_eq!(costs.families[0].seconds, 0.0015);
        let said = costs.as_text();
        assert!(said.contains("a token: 3.0 experts by the CPU, asked for 2.0 times, in 0.250 ms"), "{said}");
        assert!(said.contains("CPU time 2.250 s: 1.50 CPUs at work"), "{said}");
        assert!(costs.expert_use.is_none() && !said.contains("experts used"));
        let counters = &mut spent.counters;
        counters.link = LinkCount { bytes: 6_000_000_000, nanos: 1_500_000_000 };
        counters.add_experts(ExpertCount { used: 100, resident: 75, exchanged: 2 });
        counters.add_experts(ExpertCount { used: 100, resident: 70, exchanged: 4 });
        let said = Costs::new(&spent, 2, 10).as_text();
        assert!(said.contains("experts copied ahead: 3.000 GB, 50.0 % of the time, at 4.00 GB/s"), "{said}");
        let used = "of 100 experts used, 72.5 % were on the device; 3 came there in place of others";
        assert!(said.contains(used), "{said}");
        assert!(!said.contains("read from the file"), "{said}");
        let count = FileCount { used: 100, read: 50, bytes: 4_000_000_000, waited: 1_000_000_000 };
        spent.counters.add_reads(count);
        let said = Costs::new(&spent, 2, 10).as_text();
        let read = "of 50 experts used, 25 (2.000 GB) were read from the file, and waited for 0.500 s";
        assert!(said.contains(read), "{said}");
    }
}
