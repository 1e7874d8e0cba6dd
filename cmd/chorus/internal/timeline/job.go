package timeline

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/timeline"
)

// A Job has the timelines of all ranks.
type Job struct {
	Ranks   []*Rank
	Dropped uint64   // records that are missing
	Cut     []string // files whose last line is incomplete
}

// A Rank is a device of a process, with the times of the job: nanoseconds since its first record.
type Rank struct {
	Number  int // world rank; ranks whose number is not known follow
	known   bool
	Host    string
	Device  string // such as "cuda:3"; "" if the process recorded no device
	boot    string
	groups  map[string]string // labels of groups
	world   int               // size; 0 if not known
	streams map[stream]*track
	slices  []*slice // of all streams, in the order of the calls
	host    []timeline.Record
	ranges  []timeline.Record
	memory  []timeline.Record
}

// A stream names a stream of a rank.
type stream struct {
	handle uint64
	lane   bool
}

// A track is what a stream did.
type track struct {
	stream
	slices []*slice
}

// A slice is an operation of a stream.
type slice struct {
	timeline.Record
	rank *Rank
	on   *track
}

// newJob assigns ranks, moves all times to one clock, and makes the slices of each stream nest.
func newJob(files []*file) *Job {
	j := &Job{}
	for _, f := range files {
		j.addFile(f)
	}
	j.number()
	for _, r := range j.Ranks {
		r.arrange()
	}
	j.align()
	return j
}

// addFile adds the ranks of a process: one for each device. Records of the process go to the first.
func (j *Job) addFile(f *file) {
	byDevice := map[int]*Rank{}
	var devices []int
	for i := range f.records {
		if d := f.records[i].Device; d >= 0 && byDevice[d] == nil {
			byDevice[d] = newRank(f, fmt.Sprintf("device %d", d))
			devices = append(devices, d)
		}
	}
	slices.Sort(devices)
	if len(devices) == 0 {
		devices, byDevice[timeline.NoDevice] = []int{timeline.NoDevice}, newRank(f, "")
	}
	first := byDevice[devices[0]]
	if f.header.Rank != nil && len(devices) == 1 {
		first.Number, first.known = *f.header.Rank, true
	}
	shift := origin(&f.header)
	for _, x := range f.records {
		r := byDevice[x.Device]
		if r == nil {
			r = first
		}
		x.Begin, x.End = x.Begin+shift, x.End+shift
		j.addRecord(r, x)
	}
	if f.cut {
		j.Cut = append(j.Cut, f.name)
	}
	for _, d := range devices {
		j.Ranks = append(j.Ranks, byDevice[d])
	}
}

func newRank(f *file, device string) *Rank {
	return &Rank{Host: f.header.Host, Device: device, boot: cmp.Or(f.header.Boot, f.header.Host), world: f.header.WorldSize,
		groups: map[string]string{}, streams: map[stream]*track{}}
}

func (j *Job) addRecord(r *Rank, x timeline.Record) {
	switch x.Kind {
	case timeline.Member:
		m := x.Member
		r.Device, r.groups[m.Group] = x.Name, cmp.Or(m.Label, r.groups[m.Group])
		if m.Rank < len(m.World) {
			r.Number, r.known, r.world = m.World[m.Rank], true, max(r.world, m.WorldSize)
		} else if !r.known {
			r.Number = m.Rank
		}
	case timeline.Dropped:
		j.Dropped += x.Count
	case timeline.Wait, timeline.Driver:
		r.host = append(r.host, x)
	case timeline.Range, timeline.Instant:
		r.ranges = append(r.ranges, x)
	case timeline.Memory:
		r.memory = append(r.memory, x)
	default:
		r.addSlice(x)
	}
}

func (r *Rank) addSlice(x timeline.Record) {
	at := stream{x.Stream, x.Lane}
	t := r.streams[at]
	if t == nil {
		t = &track{stream: at}
		r.streams[at] = t
	}
	s := &slice{Record: x, rank: r, on: t}
	t.slices = append(t.slices, s)
	r.slices = append(r.slices, s)
}

// number sorts the ranks, and gives numbers to ranks without one and to a second process of a rank,
// which has replaced the first.
func (j *Job) number() {
	slices.SortStableFunc(j.Ranks, func(a, b *Rank) int { return cmp.Compare(a.Number, b.Number) })
	taken, next := map[int]bool{}, 0
	for _, r := range j.Ranks {
		next = max(next, r.Number+1)
	}
	for _, r := range j.Ranks {
		if taken[r.Number] {
			r.Number = next
			next++
		}
		taken[r.Number] = true
	}
	slices.SortFunc(j.Ranks, func(a, b *Rank) int { return cmp.Compare(a.Number, b.Number) })
}

// arrange sorts the slices and makes them nest: a stream runs its operations in order, and the
// clock of a device is compared with the host's again and again, so that times jump a little.
func (r *Rank) arrange() {
	slices.SortFunc(r.slices, func(a, b *slice) int { return cmp.Compare(a.Order, b.Order) })
	byBegin := func(a, b timeline.Record) int { return cmp.Compare(a.Begin, b.Begin) }
	slices.SortFunc(r.host, byBegin)
	slices.SortFunc(r.ranges, byBegin)
	slices.SortFunc(r.memory, byBegin)
	for _, t := range r.streams {
		t.arrange()
	}
}

// arrange moves the begin of each slice behind the end of the slice before it, and keeps the parts
// of a collective within it.
func (t *track) arrange() {
	slices.SortFunc(t.slices, func(a, b *slice) int { return cmp.Compare(a.Order, b.Order) })
	var parent *slice
	var end, endOfPart int64
	for i, s := range t.slices {
		if i == 0 {
			end = s.Begin
		}
		if parent != nil && s.Parent == parent.Order {
			s.Begin = min(max(s.Begin, endOfPart), parent.End)
			s.End = min(max(s.End, s.Begin), parent.End)
			endOfPart = s.End
			continue
		}
		s.Begin = max(s.Begin, end)
		s.End = max(s.End, s.Begin)
		end, parent, endOfPart = s.End, s, s.Begin
	}
}
