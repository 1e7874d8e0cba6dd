package analyze

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gochorus/chorus/internal/safe"
)

// newJobs returns the job of the dumps. If some of them contradict each other, and the folder, the names and the groups
// of the files divide them into jobs without contradictions, the jobs are apart.
func newJobs(dumps []*dump, files []File) *Job {
	whole := newJobOf(dumps, slices.Clone(files))
	if !whole.contradicts() {
		return whole
	}
	parts := divideJobs(dumps)
	if len(parts) < 2 {
		return whole
	}
	all := newJob()
	all.files = slices.Clone(files)
	comparing := 0 // parts that are jobs, not stray files
	for _, p := range parts {
		forget(p)
		part := slices.Clone(files)
		for i := range part {
			part[i].Error = ""
		}
		j := newJobOf(p, part)
		if j.compares() {
			comparing++
		}
		if j.contradicts() {
			comparing = 0
			break
		}
		j.name, j.files = nameOf(p), nil
		for _, d := range p {
			f := part[d.at]
			f.Job = j.name
			j.files, all.files[d.at] = append(j.files, f), f
		}
		all.jobs = append(all.jobs, j)
	}
	if comparing < 2 {
		forget(dumps)
		return newJobOf(dumps, slices.Clone(files))
	}
	for i, j := range all.jobs { // names of jobs differ
		if slices.ContainsFunc(all.jobs[:i], func(o *Job) bool { return o.name == j.name }) {
			j.name = fmt.Sprintf("%s (%d)", j.name, i+1)
		}
	}
	return all
}

// forget undoes setOtherRanks.
func forget(dumps []*dump) {
	for _, d := range dumps {
		if d.eliminated || d.guessed {
			d.world, d.eliminated, d.guessed = -1, false, false
		}
		if d.unnamed {
			d.config, d.unnamed = map[string]rawConfig{"": {Ranks: "[]"}}, false
		}
	}
}

// newJobOf returns the job of dumps, and notes in files which cannot be added.
func newJobOf(dumps []*dump, files []File) *Job {
	j := newJob()
	setOtherRanks(dumps)
	setUnknownGroups(dumps)
	for _, d := range dumps {
		j.unnamed = j.unnamed || d.unnamed
		if err := j.add(d); err != nil {
			files[d.at].Error, files[d.at].From = safe.Text(err.Error()), ""
		}
	}
	j.files = files
	return j
}

// contradicts reports whether files are of one rank, or of ranks that the others do not have.
func (j *Job) contradicts() bool {
	return len(j.twice) > 0 || len(j.twiceFiles) > 0 || slices.ContainsFunc(j.files, func(f File) bool { return f.Error != "" && f.From == "" })
}

// compares reports whether a group has the files of two ranks: it takes more than a stray file to be a job.
func (j *Job) compares() bool {
	return len(j.answers) > 0 && len(j.groups) == 0 || slices.ContainsFunc(j.groups, func(g *group) bool { return len(g.members) > 1 || g.size == 1 })
}

// divideJobs divides dumps by what files of one job have in common. Those of
// Chorus share the names of groups, which are unique, or a process. Those of
// PyTorch, whose groups have the same names in all jobs, share the folder, the
// name without the rank, and the world. Each answer of NCCL's RAS service is a
// part alone.
func divideJobs(dumps []*dump) (parts [][]*dump) {
	keys := map[string]int{} // the part that has a key
	for i, d := range dumps {
		own := []string{fmt.Sprint("file ", i)}
		switch {
		case d.service != nil:
		case !d.fromChorus():
			own = []string{fmt.Sprint("torch ", stem(d.file), d.all)}
		default:
			if d.source != nil {
				own = append(own, fmt.Sprint("process ", d.source.Host, "/", d.source.PID))
			}
			for _, c := range d.config {
				own = append(own, "group "+c.Name)
			}
		}
		at := len(parts)
		parts = append(parts, []*dump{d})
		for _, k := range own {
			if other, found := keys[k]; found && other != at {
				parts[at], parts[other] = append(parts[other], parts[at]...), nil
				for k, v := range keys {
					if v == other {
						keys[k] = at
					}
				}
			}
			keys[k] = at
		}
	}
	return slices.DeleteFunc(parts, func(p []*dump) bool { return len(p) == 0 })
}

// nameOf returns a name for the job of some files: what their paths have in common.
func nameOf(dumps []*dump) string {
	if len(dumps) == 1 {
		return safe.Text(dumps[0].file)
	}
	name := stem(dumps[0].file)
	for _, d := range dumps {
		for !strings.HasPrefix(d.file, name) {
			name = name[:len(name)-1]
		}
	}
	return safe.Text(cmp.Or(strings.TrimRight(name, "_-."), filepath.Dir(dumps[0].file)))
}

// analyzeJobs returns the report of all jobs: its verdict is that of the first job with a finding.
func (j *Job) analyzeJobs() *Report {
	r := &Report{Culprits: []Rank{}, Findings: []Finding{}, Groups: []Table{}, Files: j.files, Doubts: []string{}}
	j.unreadable(r)
	var worst *Report
	for _, part := range j.jobs {
		p := part.Analyze()
		p.Job = part.name
		for i := range p.Findings {
			p.Findings[i].Job = part.name
		}
		for i := range p.Groups {
			p.Groups[i].Job = part.name
		}
		r.Jobs, r.Findings, r.Groups = append(r.Jobs, p), append(r.Findings, p.Findings...), append(r.Groups, p.Groups...)
		if worst == nil || worst.Kind == KindNone {
			worst = p
		}
	}
	r.Kind, r.Culprits, r.Sure, r.Doubts = worst.Kind, worst.Culprits, worst.Sure, worst.Doubts
	r.Verdict = fmt.Sprintf("Job %s: %s", worst.Job, worst.Verdict)
	return r
}

// Sureness says how sure a verdict is.
type Sureness string

// The degrees of sureness.
const (
	Certain Sureness = "certain if the files are complete"
	Likely  Sureness = "likely"
	Open    Sureness = "not certain"
)

// judge sets how sure the verdict is, and why it may be wrong.
func (r *Report) judge(j *Job) {
	r.Sure, r.Doubts = Certain, []string{}
	doubt := func(s Sureness, text string) {
		if r.Doubts = append(r.Doubts, text); r.Sure == Certain || s == Open {
			r.Sure = s
		}
	}
	switch r.Kind {
	case KindNone, KindTwice, KindFile:
		if r.Kind != KindNone {
			r.Sure = Open
		}
	case KindStuck, KindSlow, KindQueued:
		doubt(Likely, "files show where the operations stopped and not why")
	case KindBehind:
		if r.Findings[0].Seq == 0 {
			doubt(Likely, "only the numbers of launched collectives show it, and ranks may capture different parts of their work")
		}
	case KindMissing:
		doubt(Likely, "a file may be missing only here: a process may have written it on another host")
	case KindService:
		doubt(Likely, "counts of a job that runs differ for a moment: ask the service again")
	}
	unread := 0
	for _, f := range j.files {
		if f.Error != "" {
			unread++
		}
	}
	if unread > 0 && r.Kind != KindFile && r.Kind != KindTwice {
		doubt(Open, fmt.Sprintf("%d of %d files could not be read", unread, len(j.files)))
	}
	guessed, eliminated := map[string]bool{}, map[string]bool{}
	shortened := false
	for _, g := range j.groups {
		for _, m := range g.members {
			guessed[m.name] = m.guessed
			eliminated[m.name] = m.eliminated
			shortened = shortened || m.full
		}
	}
	maps.DeleteFunc(guessed, func(_ string, yes bool) bool { return !yes })
	maps.DeleteFunc(eliminated, func(_ string, yes bool) bool { return !yes })
	if len(guessed) > 0 {
		doubt(Likely, "the ranks of some files are not known, neither by their names nor by their contents: see --rank-pattern")
	}
	if len(eliminated) > 0 {
		doubt(Likely, fmt.Sprintf("the files of %s have ranks because no other file has them", strings.Join(slices.Sorted(maps.Keys(eliminated)), ", ")))
	}
	if j.unnamed {
		doubt(Likely, "the files do not contain the ranks of the groups, as those of gloo do not: ranks without files may be missing here")
	}
	if shortened && (r.Kind == KindMismatch || r.Kind == KindOrder) {
		doubt(Likely, "rings have overwritten earlier operations, so that an earlier difference may be missing")
	}
	if r.Kind != KindMissing && slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Kind == KindMissing }) {
		doubt(Likely, "some ranks have no file")
	}
	if r.Kind == KindBehind && j.torch() {
		doubt(Likely, "PyTorch's files do not say when they were written: if the job ran, a rank may have been about to issue the operation")
	}
}

// torch reports whether the files are PyTorch's.
func (j *Job) torch() bool {
	return slices.ContainsFunc(j.files, func(f File) bool { return f.From == "torch" })
}
