package analyze

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/internal/timeline"
)

// A Timeline has the timelines of all ranks.
type Timeline struct {
	Ranks   []*TimelineRank
	Dropped uint64   // records that are missing
	Cut     []string // files whose last line is incomplete
	Unread  []string // files with names of timelines that are not regular files, and why
	files   int      // with those in Unread

	sizes map[string]int // of groups
}

// A TimelineRank is a device of a process, with the times of the job: nanoseconds since its first record.
type TimelineRank struct {
	Number  int // world rank; ranks whose number is not known follow
	known   bool
	Host    string
	Device  string // such as "cuda:3"; "" if the process recorded no device
	boot    string
	groups  map[string]string // labels of groups
	world   int               // size; 0 if not known
	streams map[stream]*track
	slices  []*slice // of all streams, in call order
	host    []timeline.Record
	ranges  []timeline.Record
	memory  []timeline.Record
}

// A stream names a stream of a rank.
type stream struct {
	handle uint64
	branch bool
}

// A track is what a stream did.
type track struct {
	stream
	slices []*slice
}

// A slice is an operation of a stream.
type slice struct {
	timeline.Record
	rank *TimelineRank
	on   *track
}

// newTimeline assigns ranks, moves all times to one clock, and makes the slices of each stream nest.
func newTimeline(files []*file) *Timeline {
	j := &Timeline{sizes: map[string]int{}}
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

// addFile adds a rank for each device of a process, and gives the records of
// the process to the first.
func (j *Timeline) addFile(f *file) {
	byDevice := map[int]*TimelineRank{}
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

func newRank(f *file, device string) *TimelineRank {
	return &TimelineRank{Host: f.header.Host, Device: device, boot: cmp.Or(f.header.Boot, f.header.Host), world: f.header.WorldSize,
		groups: map[string]string{}, streams: map[stream]*track{}}
}

func (j *Timeline) addRecord(r *TimelineRank, x timeline.Record) {
	switch x.Kind {
	case timeline.Member:
		m := x.Member
		r.Device, r.groups[m.Group] = x.Name, cmp.Or(m.Label, r.groups[m.Group])
		j.sizes[m.Group] = max(j.sizes[m.Group], m.Size)
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

func (r *TimelineRank) addSlice(x timeline.Record) {
	at := stream{x.Stream, x.Branch}
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
func (j *Timeline) number() {
	slices.SortStableFunc(j.Ranks, func(a, b *TimelineRank) int { return cmp.Compare(a.Number, b.Number) })
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
	slices.SortFunc(j.Ranks, func(a, b *TimelineRank) int { return cmp.Compare(a.Number, b.Number) })
}

// arrange sorts the slices and makes them nest: a stream runs its operations in order, and the
// clock of a device is compared with the host's again and again, so that times jump a little.
func (r *TimelineRank) arrange() {
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

const (
	mostTimelineFiles = 1 << 16
	mostRecords       = 1 << 25 // of all files
	mostLine          = 1 << 22
	fewRecords        = 4096 // and operations of them, of a file of any size
	bytesOfRecord     = 32   // of further ones, on average; those of the recorder have at least 40
	format            = 1
)

// A file is the content of one file.
type file struct {
	name    string
	header  timeline.Header
	records []timeline.Record
	cut     bool // the process ended while it wrote
}

// LoadTimeline reads all files of a directory.
func LoadTimeline(dir string) (*Timeline, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("timeline: %w", err)
	}
	var files []*file
	var unread []string
	left := mostRecords
	for _, e := range entries {
		if e.IsDir() || !strings.HasPrefix(e.Name(), "timeline-") || filepath.Ext(e.Name()) != ".jsonl" {
			continue
		}
		if len(files)+len(unread) == mostTimelineFiles {
			return nil, fmt.Errorf("timeline: %s has more than %d files", safe.Text(dir), mostTimelineFiles)
		}
		f, err := loadTimelineFile(filepath.Join(dir, e.Name()), left)
		if err != nil && !e.Type().IsRegular() {
			unread = append(unread, safe.Text(e.Name())+": "+reason(err))
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("timeline: %s: %w", safe.Text(e.Name()), err)
		}
		left -= len(f.records)
		files = append(files, f)
	}
	if len(files) == 0 && len(unread) > 0 {
		return nil, fmt.Errorf("timeline: no file could be read: %s", strings.Join(unread, "; "))
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("timeline: %s has no files of a timeline: set CHORUS_TIMELINE=%[1]s for the job, or call timeline.Start", safe.Text(dir))
	}
	j := newTimeline(files)
	j.Unread, j.files = unread, len(files)+len(unread)
	return j, nil
}

// reason returns an error of a file without its path.
func reason(err error) string {
	if e, ok := errors.AsType[*os.PathError](err); ok {
		err = e.Err
	}
	return safe.Text(err.Error())
}

// UnreadNote says which files could not be read, or returns "".
func (j *Timeline) UnreadNote() string {
	if len(j.Unread) == 0 {
		return ""
	}
	return fmt.Sprintf("%d of %d files could not be read: %s", len(j.Unread), j.files, strings.Join(j.Unread, "; "))
}

func loadTimelineFile(path string, most int) (*file, error) {
	r, err := safe.Open(path)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	f := &file{name: filepath.Base(path)}
	return f, f.read(r, most)
}

// read reads a header and at most that many records. An incomplete last line is ignored, because
// a process may be killed while it writes.
func (f *file) read(r io.Reader, most int) error {
	b, size, objects := bufio.NewReaderSize(r, 1<<16), 0, 0
	for n := 1; ; n++ {
		line, err := readLine(b)
		size, objects = size+len(line), objects+bytes.Count(line, []byte("{"))
		if errors.Is(err, io.EOF) {
			f.cut = len(line) > 0
			if n == 1 {
				return errors.New("the file has no header: it is empty, or the process ended while it wrote the header")
			}
			return nil
		}
		if err == nil && objects > fewRecords+size/bytesOfRecord {
			err = fmt.Errorf("%d objects in %d bytes of the file: no recorder writes records of so few bytes", objects, size)
		}
		if err == nil {
			err = f.add(line, n == 1)
		}
		if err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
		if len(f.records) > most {
			return fmt.Errorf("the directory has more than %d records: record fewer steps with timeline.Start", mostRecords)
		}
	}
}

// readLine returns the next line, which is incomplete if the error is io.EOF.
func readLine(b *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		part, err := b.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil:
			return bytes.TrimSuffix(line, []byte("\n")), nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return line, err
		case len(line) > mostLine:
			return nil, fmt.Errorf("more than %d bytes", mostLine)
		}
	}
}

func (f *file) add(line []byte, first bool) error {
	if first {
		if err := json.Unmarshal(line, &f.header); err != nil {
			return err
		}
		safe.Record(&f.header)
		if f.header.Format != format {
			return fmt.Errorf("the file has the format %d: this chorus reads %d", f.header.Format, format)
		}
		if origin := origin(&f.header); origin < 0 || origin > mostOrigin {
			return fmt.Errorf("an origin at %d ns", origin)
		}
		return nil
	}
	var x timeline.Record
	if err := json.Unmarshal(line, &x); err != nil {
		return err
	}
	safe.Record(&x)
	if err := check(&x); err != nil {
		return err
	}
	f.records = append(f.records, x)
	return nil
}

// These limits prevent overflows when times, origins and offsets between hosts are added.
const (
	mostTime   = 1 << 58 // of a record since its origin: nine years
	mostOrigin = 1 << 61 // the year 2043 on the wall clock
)

// origin returns the origin of a process: on the clock of its host, or the wall clock if the host is
// not known.
func origin(h *timeline.Header) int64 {
	if h.Boot == "" {
		return h.Wall
	}
	return h.Monotonic
}

func check(x *timeline.Record) error {
	switch {
	case x.Begin < -mostTime || x.Begin > mostTime || x.End < -mostTime || x.End > mostTime:
		return fmt.Errorf("a record from %d to %d ns", x.Begin, x.End)
	case x.Device < timeline.NoDevice:
		return fmt.Errorf("a record of the device %d", x.Device)
	case x.Kind == timeline.Member && x.Member == nil, x.Kind == timeline.Collective && x.Device < 0:
		return fmt.Errorf("an incomplete record of the kind %s", x.Kind)
	case x.Member != nil && (x.Member.Rank < 0 || x.Member.Size < 1 || slices.Min(append(x.Member.World, 0)) < 0):
		return fmt.Errorf("rank %d of %d", x.Member.Rank, x.Member.Size)
	}
	return nil
}

// align moves the times of each host, whose processes share a clock, to the
// clock of the first rank's host, and its origin to the first record.
func (j *Timeline) align() {
	offsets := j.offsets()
	first := int64(math.MaxInt64)
	for _, r := range j.Ranks {
		r.shift(-offsets[r.boot])
		r.each(func(x *timeline.Record) { first = min(first, x.Begin) })
	}
	for _, r := range j.Ranks {
		r.shift(-first)
	}
}

func (r *TimelineRank) shift(by int64) {
	r.each(func(x *timeline.Record) { x.Begin, x.End = x.Begin+by, x.End+by })
}

func (r *TimelineRank) each(visit func(*timeline.Record)) {
	for _, s := range r.slices {
		visit(&s.Record)
	}
	for _, list := range [][]timeline.Record{r.host, r.ranges, r.memory} {
		for i := range list {
			visit(&list[i])
		}
	}
}

// offsets returns how far the clock of each host is ahead of the first rank's host. A collective of
// all its ranks ends on all hosts at nearly the same time, so the offset is the median difference
// of these ends. Hosts are compared with the first host, or with one that was compared before.
func (j *Timeline) offsets() map[string]int64 {
	known := map[string]int64{}
	if len(j.Ranks) > 0 {
		known[j.Ranks[0].boot] = 0
	}
	ends := j.ends()
	for {
		found := false
		for _, r := range j.Ranks {
			if _, ok := known[r.boot]; ok {
				continue
			}
			if by, ok := offsetTo(ends, known, r.boot); ok {
				known[r.boot], found = by, true
			}
		}
		if !found {
			return known // hosts without a common collective keep their own clock
		}
	}
}

// ends returns when each collective ended on each host.
func (j *Timeline) ends() map[collective]map[string]int64 {
	ends := map[collective]map[string]int64{}
	for _, r := range j.Ranks {
		for _, s := range r.slices {
			for _, o := range s.Ops {
				if o.Transfer || o.Peer >= 0 {
					continue // the ranks of these end at different times
				}
				k := collective{o.Group, o.Sequence}
				if ends[k] == nil {
					ends[k] = map[string]int64{}
				}
				ends[k][r.boot] = max(cmp.Or(ends[k][r.boot], math.MinInt64), s.End)
			}
		}
	}
	return ends
}

func offsetTo(ends map[collective]map[string]int64, known map[string]int64, host string) (int64, bool) {
	var list []int64
	for _, on := range ends {
		end, ok := on[host]
		if !ok {
			continue
		}
		for other, by := range known {
			e, ok := on[other]
			if offset := end - (e - by); ok && offset >= -mostOrigin && offset <= mostOrigin {
				list = append(list, offset)
			}
		}
	}
	if len(list) == 0 {
		return 0, false
	}
	slices.Sort(list)
	return list[len(list)/2], true
}

// A collective names a collective of a job.
type collective struct {
	group    string
	sequence uint64
}
