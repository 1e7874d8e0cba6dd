// Package analyze compares the flight recorders of all ranks of a job and says which rank,
// or which hardware, a hang comes from. It reads the dumps of Chorus and of PyTorch, as JSON or
// pickles, and answers of NCCL's RAS service. It also finds the rank that the others wait for again and again.
//
// NCCL 2.24 and newer run the RAS service in each process; its answer is JSON from NCCL 2.28.7 on. AskRAS asks it for the
// state of a job's communicators, and which of their ranks are silent, failed or behind. Any process of the host may
// listen on the service's port: DecodeRAS validates the answer.
//
// LoadTimeline reads the files of internal/timeline. A Timeline merges those of all ranks into one file for
// Perfetto, and computes how much of the communication is hidden behind kernels. The files may come from
// anybody: Load limits their size and number, and no text of a file reaches the report without safe.Text.
package analyze

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Analyze compares the ranks of a job.
func (j *Job) Analyze() *Report {
	if len(j.jobs) > 0 {
		return j.analyzeJobs()
	}
	r := &Report{Culprits: []Rank{}, Findings: []Finding{}, Groups: []Table{}, Files: j.files}
	j.unreadable(r)
	for _, g := range j.groups {
		r.Groups = append(r.Groups, g.table())
		if x := g.mismatch(); x != nil {
			r.add(KindMismatch, x.text(), g, x.seq, ranks(x.culprits()))
		}
	}
	j.hangs(r)
	j.missing(r)
	j.addEnds(r)
	j.service(r)
	slices.SortStableFunc(r.Findings, func(a, b Finding) int { return slices.Index(kinds, a.Kind) - slices.Index(kinds, b.Kind) })
	r.conclude()
	if r.Kind == KindNone {
		r.Verdict += j.unrecorded()
	}
	r.judge(j)
	return r
}

func (r *Report) add(kind, text string, g *group, seq uint64, culprits []Rank) {
	f := Finding{Kind: kind, Text: text, Seq: seq, Ranks: culprits}
	if g != nil {
		f.Group = g.name
	}
	r.Findings = append(r.Findings, f)
}

// conclude chooses the first finding as the verdict.
func (r *Report) conclude() {
	r.Kind = KindNone
	r.Verdict = "No difference found: all ranks issued the same operations, and none of them waits for another."
	if len(r.Groups) == 0 {
		r.Verdict = "No file has operations."
	}
	if len(r.Findings) > 0 {
		f := &r.Findings[0]
		r.Kind, r.Verdict, r.Culprits = f.Kind, f.Text, append(r.Culprits, f.Ranks...)
	}
}

// unrecorded names what the recorders do not have, and what has not ended, or returns "".
func (j *Job) unrecorded() string {
	for _, g := range j.groups {
		if list := slices.DeleteFunc(g.present(), func(m *member) bool { return !m.launches }); len(list) > 0 {
			return fmt.Sprintf(" But launches of graphs or one-sided operations of %s in %s are not known to have ended, and the recorders do not have them.", names(list), g.name)
		}
	}
	return ""
}

// service adds the findings of NCCL's RAS service, whose ranks are ranks of
// communicators.
func (j *Job) service(r *Report) {
	for _, a := range j.answers {
		for _, text := range a.Findings(func(c *RASCommunicator, rank int) string {
			return fmt.Sprintf("rank %d of communicator %s", rank, c.Hash)
		}) {
			r.add(KindService, "NCCL's RAS: "+text+".", nil, 0, nil)
		}
	}
}

func (j *Job) unreadable(r *Report) {
	for _, f := range j.files {
		if f.Error != "" {
			r.add(KindFile, fmt.Sprintf("The file %s cannot be read: %s.", f.Name, f.Error), nil, 0, nil)
		}
	}
	for _, p := range j.twiceFiles[:min(len(j.twiceFiles), 1)] {
		r.add(KindTwice, fmt.Sprintf("The files %s and %s are of the same rank: they are of two runs or of two jobs, so that no comparison is possible. Analyze the files of one run.", p[0], p[1]), nil, 0, nil)
	}
	if len(j.twiceFiles) > 0 {
		j.twice = nil
	}
	for _, p := range j.twice[:min(len(j.twice), 1)] {
		r.add(KindTwice, fmt.Sprintf("The files are of two runs or of two jobs: %s and %s have the same rank, so that no comparison is possible. Analyze the files of one run.", p[0].name, p[1].name), nil, 0, nil)
	}
	for _, g := range j.groups {
		for _, m := range g.members {
			if m.unknown {
				r.add(KindFile, fmt.Sprintf("The operations of %s in %s are not known: the recorder was off, or its ring was too small; set CHORUS_NCCL_TRACE_SIZE or TORCH_FR_BUFFER_SIZE.", m.name, g.name), g, 0, nil)
			}
		}
	}
}

// missing reports the ranks without a file that no other finding has explained.
func (j *Job) missing(r *Report) {
	var list []Rank
	ended := map[int]string{}
	for _, g := range j.groups {
		for _, n := range j.absent(g) {
			if text := j.endedText(n); text != "" && !n.seen {
				ended[n.world] = text
			} else if !slices.ContainsFunc(list, func(x Rank) bool { return x.Name == n.name }) && len(list) < mostNamed && !n.seen {
				list = append(list, n.rank())
			}
		}
	}
	for _, rank := range slices.Sorted(maps.Keys(ended)) {
		if !slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Kind == KindMissing }) {
			r.add(KindMissing, ended[rank]+".", nil, 0, []Rank{{Name: fmt.Sprint("rank ", rank), World: &rank}})
		}
	}
	if len(list) == 0 || slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Kind == KindMissing }) {
		return
	}
	text := "No file has the operations of %s. Either the process ended before it wrote one, or its files are missing here."
	if j.live {
		text = "No answer came from %s: the process has ended or hangs, or its host is not reachable."
	}
	r.add(KindMissing, fmt.Sprintf(text, joined(list)), nil, 0, list)
}

// addEnds adds to findings of missing ranks and of stuck operations how the groups ended for the first rank that says so.
func (j *Job) addEnds(r *Report) {
	var first *member
	for _, g := range j.groups {
		for _, m := range g.present() {
			if m.end != "" && (first == nil || m.written < first.written) {
				first = m
			}
		}
	}
	for i := range r.Findings {
		if f := &r.Findings[i]; (f.Kind == KindMissing || f.Kind == KindStuck) && first != nil {
			f.Text += fmt.Sprintf(" The file of %s says: %s.", first.name, strings.TrimSuffix(first.end, "."))
		}
	}
}

// endedText describes a rank whose file has no groups: it had closed them before it wrote the file.
func (j *Job) endedText(n *node) string {
	who, ok := j.ended[n.world]
	if !ok {
		return ""
	}
	return fmt.Sprintf("%s (%s) ended before the other ranks: it had closed its groups when it wrote its file", upper(n.name), who)
}

func joined(list []Rank) string {
	texts := make([]string, len(list))
	for i, x := range list {
		texts[i] = x.Name
	}
	return strings.Join(texts, ", ")
}

// hangs reports why operations do not complete.
func (j *Job) hangs(r *Report) {
	var all, complete []*stuck
	var waits []wait
	blocked := map[*node]bool{}
	for _, g := range j.groups {
		for _, f := range g.transfers() {
			r.add(KindTransfer, f.text, g, 0, ranks(f.ranks))
			if f.to != nil {
				waits = append(waits, f.wait)
			}
		}
		waits = append(waits, g.behindOthers()...)
		s := g.stuck()
		if s == nil {
			continue
		}
		all = append(all, s)
		list := j.waits(s)
		waits = append(waits, list...)
		if len(list) > 0 && !slices.ContainsFunc(list, func(w wait) bool { return w.to.seen }) {
			j.addQueued(r, s) // a rank without a file may be to blame, but this one is known to be late
		}
		if len(list) > 0 || !j.known(g) {
			continue
		}
		complete = append(complete, s)
		for _, m := range s.issuers {
			blocked[m.node] = blocked[m.node] || len(s.done) == 0 && m.pending() != nil
		}
	}
	g := newGraph(waits)
	if c := g.cycle(); c != nil {
		r.addCycle(c)
		return
	}
	if a, b, first, second, ok := inversion(all); ok {
		r.addInversion(a, b, first, second)
		return
	}
	for _, w := range g.sinks(blocked) {
		j.addSink(r, w)
	}
	for _, s := range complete {
		if !slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Kind == KindMismatch && f.Group == s.group.name }) {
			j.addComplete(r, s)
		}
	}
	if len(r.Findings) > 0 {
		return
	}
	for _, g := range j.groups {
		r.addPendingTransfer(g)
		r.addLaunches(g)
	}
	if len(r.Findings) == 0 && !j.live { // an error of a job that runs names the rank already
		for _, g := range j.groups {
			r.addEnded(g)
		}
	}
}

func (r *Report) addCycle(c []*wait) {
	text, list := "Ranks wait for each other in a cycle: ", []Rank{}
	for i, w := range c {
		if i > 0 {
			text += "; "
		}
		text += w.text() + w.op.unreturned() + place(w.op)
		if w.behind != nil {
			text += fmt.Sprintf(", whose matching operation is queued behind its %s%s", w.behind.position(), place(w.behind))
		}
		list = append(list, w.from.rank())
	}
	switch {
	case slices.ContainsFunc(c, func(w *wait) bool { return w.group != c[0].group }):
		text += ". The ranks use the groups in different orders: issue the operations of groups that share ranks in the same order on all ranks."
	case slices.ContainsFunc(c, func(w *wait) bool { return w.op.peer < 0 }):
		text += ". Issue the sends, receives and collectives of a group in the same order on all ranks: the matching operation of a send or a receive is missing before the collective."
	default:
		text += ". Change the order of the sends and receives, or put those of a rank into one Batch (comm.SendRecv does)."
	}
	r.add(KindOrder, text, c[0].group, c[0].op.seq, list)
}

func (r *Report) addInversion(a, b *stuck, first, second []*node) {
	who, few, culprits := first[0].name, second[0].name, []Rank{first[0].rank(), second[0].rank()}
	if len(first) > len(second) { // the few are probably wrong
		if who, culprits = fmt.Sprintf("%d ranks, such as %s,", len(first), who), nil; len(second) > 1 {
			few = fmt.Sprintf("%d ranks, such as %s,", len(second), few)
		}
		for _, n := range second[:min(len(second), mostNamed)] {
			culprits = append(culprits, n.rank())
		}
	}
	text := fmt.Sprintf("The ranks use groups in different orders: %s issued %s of %s before %s of %s, and %s issued them the other way round. Each rank runs the operations in its own order, so they wait for each other. Issue the operations of groups that share ranks in the same order on all ranks.",
		who, a.op.position(), a.group.name, b.op.position(), b.group.name, few)
	r.add(KindOrder, text, a.group, a.seq, culprits)
}

// addSink reports a rank that other ranks wait for and that waits for no rank.
func (j *Job) addSink(r *Report, w *wait) {
	switch {
	case w.op.peer >= 0:
		return // the transfer is a finding already
	case !w.to.seen && j.endedText(w.to) != "":
		r.add(KindMissing, fmt.Sprintf("%s, and they wait in %s of %s%s. Look at why its program ended.",
			j.endedText(w.to), w.op.position(), w.group.name, place(w.op)), w.group, w.op.seq, []Rank{w.to.rank()})
		return
	case !w.to.seen:
		text := "No file has the operations of %s"
		if j.live {
			text = "No answer came from %s"
		}
		r.add(KindMissing, fmt.Sprintf(text+", and the other ranks wait in %s of %s%s. Its process has probably ended or hangs: look at its output and its host.",
			w.to.name, w.op.position(), w.group.name, place(w.op)), w.group, w.op.seq, []Rank{w.to.rank()})
		return
	}
	if !slices.ContainsFunc(w.group.present(), func(m *member) bool { return m.node == w.to }) {
		r.add(KindMissing, fmt.Sprintf("The operations of %s in %s are not known, and the other ranks wait in %s%s. The rank has left the group, or its recorder was off.",
			w.to.name, w.group.name, w.op.position(), place(w.op)), w.group, w.op.seq, []Rank{w.to.rank()})
		return
	}
	if first := w.group.failedFirst(); len(first) > 0 && !slices.ContainsFunc(first, func(m *member) bool { return m.node == w.to }) {
		r.addFailed(w.group, w.op, w.op.seq, first) // the rank had no time to issue it
		return
	}
	if gone := j.goneFirst(w); len(gone) > 0 {
		r.add(KindMissing, fmt.Sprintf("No file has the operations of %s, and all ranks that have one ended %s because of another rank, before %s had issued %s%s. Its process has probably ended or hangs: look at its output and its host.",
			joined(gone), w.group.name, w.to.name, w.op.position(), place(w.op)), w.group, w.op.seq, gone)
		return
	}
	text := fmt.Sprintf("%s has not issued %s of %s, and other ranks, such as %s, wait for it%s. ", upper(w.to.name), w.op.position(), w.group.name, w.from.name, place(w.op))
	if e, g := j.lastOf(w.to); e == nil {
		text += "It has issued no operation at all: look at what its program does before its first operation."
	} else {
		text += fmt.Sprintf("Its last operation is %s of %s, issued at %s%s, %s: look at what its program does after this operation.",
			e.position(), g.name, moment(e.created), place(e), e.state())
	}
	r.add(KindBehind, text, w.group, w.op.seq, []Rank{w.to.rank()})
}

// goneFirst returns the ranks without a file if all ranks of the group that have one ended it because of another rank: the rank that
// is waited for then had no time to issue the operation.
func (j *Job) goneFirst(w *wait) (list []Rank) {
	if slices.ContainsFunc(w.group.present(), func(m *member) bool { return m.end == "" || !m.follows }) {
		return nil
	}
	for _, n := range j.absent(w.group) {
		list = append(list, n.rank())
	}
	return list
}

// lastOf returns the latest operation of a rank in all groups.
func (j *Job) lastOf(n *node) (last *entry, of *group) {
	for _, g := range j.groups {
		for _, m := range g.members {
			if k := len(m.list); m.node == n && k > 0 && (last == nil || m.list[k-1].created > last.created) {
				last, of = &m.list[k-1], g
			}
		}
	}
	return last, of
}

// addComplete reports a collective that all ranks have issued.
func (j *Job) addComplete(r *Report, s *stuck) {
	if first := s.group.failedFirst(); len(first) > 0 {
		r.addFailed(s.group, s.op, s.seq, first)
		return
	}
	if j.addQueued(r, s) {
		return
	}
	var slow []*member
	started := true
	for _, m := range s.issuers {
		e := m.pending()
		if e != nil && e.seq < s.seq {
			slow = append(slow, m)
		}
		started = started && e != nil && e.started
	}
	if len(slow) == 0 && len(s.done) > 0 {
		slow = slices.DeleteFunc(slices.Clone(s.issuers), func(m *member) bool { return slices.Contains(s.done, m) })
	}
	if len(slow) > 0 && len(slow) < len(s.issuers) {
		e := slow[0].pending()
		why := "The rank may be slow, its stream may run other work, or its GPU or link may be broken"
		if e.started {
			why = "Its stream has reached it, so the rank is slow, or its GPU or link is broken, or other work occupies its GPU"
		}
		r.add(KindSlow, fmt.Sprintf("All ranks have issued %s of %s, and other ranks have completed it, but it is not known to have completed on %s. %s: check its GPU (%s) and its host.",
			e.position(), s.group.name, names(slow), why, devices(slow)), s.group, e.seq, ranks(slow))
		return
	}
	r.add(KindStuck, fmt.Sprintf("All %d ranks have issued %s of %s, the recorders show no difference, and none is known to have completed it. %s: %s. chorus perf measures them.",
		len(s.issuers), s.op.position(), s.group.name, stuckAdvice(started), devices(s.issuers)), s.group, s.seq, nil)
}

// addQueued reports the ranks whose streams have not reached the collective. If some ranks have no file, it reports them only if other
// ranks have started it, and the stream does not wait for another collective.
func (j *Job) addQueued(r *Report, s *stuck) bool {
	var queued []*member
	started := false
	for _, m := range s.issuers {
		e := m.pending()
		if e != nil && e.queued && !m.waitsBehindItself(e) {
			queued = append(queued, m)
		}
		started = started || e != nil && e.started
	}
	if len(queued) == 0 {
		return false
	}
	elsewhere, all := j.startedElsewhere(queued[0], s.group), len(s.issuers) == s.group.size
	if !all && (!started || elsewhere != "") {
		return false
	}
	e, who := queued[0].pending(), "All ranks"
	if !all {
		who = "All ranks that have files"
	}
	r.add(KindQueued, fmt.Sprintf("%s have issued %s of %s, but the stream of %s has not reached it%s. Work that was enqueued on the stream before it still runs or waits, such as a kernel, or a wait for another stream.%s Look at what the program enqueues before this operation.",
		who, e.position(), s.group.name, names(queued), place(e), elsewhere), s.group, e.seq, ranks(queued))
	return true
}

// addLaunches reports the ranks whose launches of graphs had fewer collectives than those of a rank whose launches have not ended.
func (r *Report) addLaunches(g *group) {
	var most *member
	for _, m := range g.present() {
		if m.launches && (most == nil || m.launched > most.launched) {
			most = m
		}
	}
	if most == nil {
		return
	}
	var behind []*member
	var counts []string
	for _, m := range g.present() {
		if m.launched < most.launched {
			behind = append(behind, m)
			counts = append(counts, fmt.Sprintf("%s has launched %d", m.name, m.launched))
		}
	}
	if len(behind) == 0 {
		return
	}
	r.add(KindBehind, fmt.Sprintf("%s has launched %d collectives of %s in graphs, and the launches are not known to have ended. But %s: check that all ranks launch their graphs equally often and in the same order.",
		upper(most.name), most.launched, g.name, strings.Join(counts[:min(len(counts), mostNamed)], ", ")), g, 0, ranks(behind))
}

// addFailed reports, once for each group, that ranks ended it during a collective, and the other ranks because of them.
func (r *Report) addFailed(g *group, op *entry, seq uint64, first []*member) {
	if slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Kind == KindFailed && f.Group == g.name }) {
		return
	}
	r.add(KindFailed, fmt.Sprintf("%s ended %s during %s, and the other ranks ended it because of that. Its file says: %s.",
		upper(names(first)), g.name, op.position(), strings.TrimSuffix(first[0].end, ".")), g, seq, ranks(first))
}

// addEnded reports that ranks ended the group, and the other ranks because of them, before an operation of the group waited for one.
func (r *Report) addEnded(g *group) {
	first := g.failedFirst()
	if len(first) == 0 {
		return
	}
	after := "before its first collective"
	if seq := first[0].last; seq > 0 {
		after = fmt.Sprintf("after collective %d", seq)
	}
	r.add(KindFailed, fmt.Sprintf("%s ended %s %s, and the other ranks ended it because of that; no operation waited for another rank. Its file says: %s.",
		upper(names(first)), g.name, after, strings.TrimSuffix(first[0].end, ".")), g, first[0].last, ranks(first))
}

// failedFirst returns the ranks that ended the group by themselves, if all other ranks say that another rank may be the cause.
func (g *group) failedFirst() (first []*member) {
	for _, m := range g.present() {
		switch {
		case m.end == "":
			return nil
		case !m.follows:
			first = append(first, m)
		}
	}
	if len(first) == len(g.present()) {
		return nil
	}
	return first
}

// stuckAdvice says what may be the cause if all ranks have issued an operation and none completes it.
func stuckAdvice(started bool) string {
	if started {
		return "The streams of all ranks have reached it. Look for other work that occupies a GPU, and check the GPUs and the links between them"
	}
	return "It is not known whether the streams of all ranks have reached it. Look for other work on these streams, and check the GPUs and the links between them"
}

// startedElsewhere names a started operation of another group that the rank's stream may wait for.
func (j *Job) startedElsewhere(m *member, g *group) string {
	for _, other := range j.groups {
		for _, x := range other.members {
			if e := x.head(); other != g && x.node == m.node && e != nil && e.started {
				return fmt.Sprintf(" Of %s, %s has started on this rank and is not known to have completed.", other.name, e.position())
			}
		}
	}
	return ""
}

// devices names the GPUs of ranks.
func devices(list []*member) string {
	var texts []string
	for _, m := range list[:min(len(list), mostNamed)] {
		text := m.name
		if m.uuid != "" {
			text += ": " + m.device + " " + m.uuid
		}
		texts = append(texts, text)
	}
	if more := len(list) - mostNamed; more > 0 {
		texts = append(texts, fmt.Sprintf("%d more", more))
	}
	return strings.Join(texts, ", ")
}
