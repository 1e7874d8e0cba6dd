package analyze

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/gochorus/chorus/internal/safe"
)

// A Job has the recorded operations of all ranks.
type Job struct {
	files  []File
	groups []*group // in file order
	byKey  map[string]*group
	nodes  map[string]*node
	twice  [][2]*node // a rank that has files of two processes
	// twiceFiles are files of PyTorch that have the same rank.
	twiceFiles [][2]string
	torchFiles map[int]string // by rank
	entries    int
	live       bool           // the dumps are answers of ranks that run
	asked      []int          // the ranks of the world that were asked for a dump, if live
	ended      map[int]string // world ranks whose file has no groups, with their processes
	answers    []*RASAnswer   // of NCCL's RAS service

	unnamed bool // the ranks of groups are those of the files

	name string // of the job, if the files are of several
	jobs []*Job // the jobs, if the files are of several
}

// A node is one rank of the job in all its groups.
type node struct {
	world  int // -1 if not known
	host   string
	pid    int
	device string
	uuid   string
	name   string // for people
	seen   bool   // a file of it was read
	// Of PyTorch's files: the rank is the only one that no other file has, or it is not known, and world is one of those possible.
	eliminated, guessed bool
}

// A group is a communicator.
type group struct {
	key, name string
	size      int
	world     []int // world ranks by rank; nil if not known
	members   map[int]*member
}

// A member is a rank of a group whose operations are known.
type member struct {
	*node
	rank    int
	file    string  // the name of the file
	written int64   // when the dump was written; 0 if not known
	end     string  // how the group ended there, as its process noticed first
	follows bool    // the cause may be another rank
	list    []entry // in the order they were issued
	colls   []entry // the collectives of list
	full    bool    // the dump does not have all operations
	unknown bool    // the recorder was off, or has no operation of this group left
	first   uint64  // the first collective that the ring still holds
	last    uint64  // the last collective that was issued

	launched uint64 // collectives that launches of graphs have enqueued
	launches bool   // launches of graphs or one-sided operations, which list does not have, are not known to have ended
}

func (d *dump) fromChorus() bool {
	for _, c := range d.config {
		return c.Rank != nil
	}
	return d.source != nil
}

// add adds the content of a file.
func (j *Job) add(d *dump) error {
	if d.service != nil {
		j.answers = append(j.answers, d.service)
		return nil
	}
	if j.entries += len(d.entries); j.entries > mostJobEntries {
		return fmt.Errorf("the files have more than %d operations: analyze fewer files", mostJobEntries)
	}
	if !d.fromChorus() && d.world < 0 {
		return fmt.Errorf("the dump is from PyTorch, of one of the ranks %.80s, which all have files of their own: it is of another job, or a copy", fmt.Sprint(d.candidates))
	}
	if len(d.config) == 0 && d.source != nil {
		if rank, _, ok := worldOf(d.file); ok {
			j.ended[rank] = fmt.Sprintf("PID %d on %s", d.source.PID, d.source.Host)
		}
		return nil
	}
	if !d.fromChorus() { // PyTorch writes one file for each rank
		if other := j.torchFiles[d.world]; other != "" {
			j.twiceFiles = append(j.twiceFiles, [2]string{other, safe.Text(d.file)})
		}
		j.torchFiles[d.world] = safe.Text(d.file)
	}
	byGroup, wrapped := d.divide()
	for _, id := range slices.Sorted(maps.Keys(d.config)) {
		c := d.config[id]
		safe.Record(&c)
		if err := j.addGroup(d, id, &c, byGroup[id], wrapped); err != nil {
			return err
		}
	}
	return nil
}

// mostJobEntries limits the memory of a job, to about a gigabyte.
const mostJobEntries = 8 << 20

// divide returns the entries by group, and wrapped if PyTorch's ring, which all
// groups share, has overwritten operations.
func (d *dump) divide() (byGroup map[string][]entry, wrapped bool) {
	byGroup, wrapped = map[string][]entry{}, len(d.entries) > 0
	for _, e := range d.entries {
		id := strconv.FormatInt(e.group, 10)
		if d.config[id].Name != e.groupName {
			id = e.groupName // PyTorch's keys are the names
		}
		byGroup[id] = append(byGroup[id], e)
		wrapped = wrapped && e.record > 0
	}
	return byGroup, wrapped && !d.fromChorus()
}

func (j *Job) addGroup(d *dump, id string, c *rawConfig, list []entry, wrapped bool) error {
	ranks, err := ranksOf(c.Ranks)
	if err != nil {
		return err
	}
	world := d.world
	if d.fromChorus() {
		world = -1
	}
	m := &member{node: &node{world: world, guessed: d.guessed, eliminated: d.eliminated}, file: safe.Text(d.file), list: list, full: wrapped}
	g := &group{key: c.Name, name: cmp.Or(c.Desc, "group "+c.Name), size: len(ranks), world: ranks, members: map[int]*member{}}
	if c.Rank == nil {
		g.key = fmt.Sprint(c.Name, ranks)
		if m.rank = slices.Index(ranks, world); m.rank < 0 {
			if len(list) > 0 {
				return fmt.Errorf("the file is of rank %d by its name or the pattern, and has operations of group %q, whose ranks are %.80s: it is of another rank or of another job", world, cmp.Or(c.Desc, c.Name), c.Ranks)
			}
			return nil // PyTorch knows the ranks of groups that it is not in
		}
		for i := range list {
			list[i].uneven = list[i].op == "all_to_all" // PyTorch uses this name for both kinds
		}
		m.unknown = wrapped && len(list) == 0
		if m.name = fmt.Sprint("rank ", world); d.guessed {
			m.name = "the rank of " + filepath.Base(m.file)
		}
	} else {
		g.world, m.rank = nil, *c.Rank
		if m.rank < 0 || m.rank >= len(ranks) {
			return fmt.Errorf("the file has rank %d of %d ranks", m.rank, len(ranks))
		}
		d.describe(id, g, m)
	}
	j.keep(g, m)
	return nil
}

// describe fills what only dumps of Chorus have.
func (d *dump) describe(id string, g *group, m *member) {
	m.world = -1
	m.full = len(m.list) > 0 && m.list[0].record > 1
	m.name = fmt.Sprintf("rank %d of %s", m.rank, g.name)
	m.device = d.file // tells the nodes of dumps without a source apart
	if d.source == nil {
		return
	}
	m.host, m.pid, m.written = d.source.Host, d.source.PID, d.source.Clock.Wall
	for _, s := range d.source.Groups {
		if strconv.FormatInt(s.Group, 10) != id {
			continue
		}
		m.device, m.uuid, m.end, m.follows = s.Device, s.UUID, safe.Text(s.End), s.EndFollows
		m.unknown = s.Capacity == 0 && s.Issued > 0
		m.full = m.full || s.Shortened
		m.launched, m.launches = s.Launched, s.Launches
		for i := range m.list {
			m.list[i].inCall = m.list[i].record > s.Accepted
		}
		if len(s.WorldRanks) == g.size && s.WorldRank != nil {
			g.world, m.world = s.WorldRanks, *s.WorldRank
			m.name = fmt.Sprint("rank ", m.world)
			if c := d.config[id]; c.Desc == "" && s.WorldSize == g.size {
				g.name = fmt.Sprintf("the world group (%s)", c.Name)
			}
		}
	}
	m.name += fmt.Sprintf(" (PID %d on %s)", m.pid, m.host)
}

// ranksOf reads "[0, 1, 2]".
func ranksOf(text string) (ranks []int, err error) {
	if err := json.Unmarshal([]byte(text), &ranks); err != nil || len(ranks) == 0 || len(ranks) > mostRanks {
		return nil, fmt.Errorf("the ranks of a group are %.80q: want a list of 1 to %d numbers", text, mostRanks)
	}
	return ranks, nil
}

// keep adds a member; if several files have it, the one that was written last
// counts.
func (j *Job) keep(g *group, m *member) {
	m.seal()
	id := fmt.Sprint("world ", m.world)
	if m.world < 0 {
		id = fmt.Sprint(m.host, "/", m.pid, "/", m.device)
	}
	m.seen = true
	if known := j.nodes[id]; known != nil {
		if known.host != m.host || known.pid != m.pid {
			j.twice = append(j.twice, [2]*node{known, m.node})
		}
		m.node = known
	} else {
		j.nodes[id] = m.node
	}
	if known := j.byKey[g.key]; known == nil {
		j.byKey[g.key] = g
		j.groups = append(j.groups, g)
	} else {
		g = known
	}
	old := g.members[m.rank]
	if old != nil && (old.written == 0 || m.written == 0) { // of PyTorch
		j.twice = append(j.twice, [2]*node{old.node, m.node})
	}
	if old == nil || old.written <= m.written {
		g.members[m.rank] = m
	}
}

// seal computes the positions of a member from its entries.
func (m *member) seal() {
	slices.SortStableFunc(m.list, func(a, b entry) int { return cmp.Compare(a.record, b.record) })
	for _, e := range m.list {
		if e.peer < 0 {
			m.colls = append(m.colls, e)
		}
		m.last = max(m.last, e.seq)
	}
	slices.SortStableFunc(m.colls, func(a, b entry) int { return cmp.Compare(a.seq, b.seq) })
	switch {
	case len(m.colls) > 0 && m.full:
		m.first = m.colls[0].seq
	case m.full:
		m.first = m.last + 1
	default:
		m.first = 1
	}
}

// index returns the position of the first collective with a number of at least seq.
func (m *member) index(seq uint64) int {
	i, _ := slices.BinarySearchFunc(m.colls, seq, func(e entry, seq uint64) int { return cmp.Compare(e.seq, seq) })
	return i
}

// at returns the collectives with a number; PyTorch gives all collectives of a coalesced call the same number.
func (m *member) at(seq uint64) []entry {
	from := m.index(seq)
	to := from
	for to < len(m.colls) && m.colls[to].seq == seq {
		to++
	}
	return m.colls[from:to]
}

// present returns the members whose operations are known, by rank.
func (g *group) present() (list []*member) {
	for _, rank := range slices.Sorted(maps.Keys(g.members)) {
		if m := g.members[rank]; !m.unknown {
			list = append(list, m)
		}
	}
	return list
}

// absent returns the nodes of the ranks whose operations in g are not known, at most some of them.
func (j *Job) absent(g *group) (list []*node) {
	for rank := 0; rank < g.size && len(list) < mostNamed; rank++ {
		if m := g.members[rank]; m != nil {
			if m.unknown {
				list = append(list, m.node)
			}
			continue
		}
		n := &node{world: -1, name: fmt.Sprintf("rank %d of %s", rank, g.name)}
		if rank < len(g.world) {
			if !j.mayAnswer(g.world[rank]) {
				continue
			}
			n.world, n.name = g.world[rank], fmt.Sprint("rank ", g.world[rank])
			if g.guesses() {
				n.name = "a rank without a file"
			}
			if known := j.nodes[fmt.Sprint("world ", n.world)]; known != nil {
				n = known
			}
		}
		list = append(list, n)
	}
	return list
}

// guesses reports whether the ranks of some files are not known.
func (g *group) guesses() bool {
	for _, m := range g.members {
		if m.guessed {
			return true
		}
	}
	return false
}

// mayAnswer reports whether the operations of a rank of the world can be known.
func (j *Job) mayAnswer(world int) bool { return !j.live || slices.Contains(j.asked, world) }

// known reports whether the operations of all ranks of a group can be known.
func (j *Job) known(g *group) bool {
	return !slices.ContainsFunc(g.world, func(world int) bool { return !j.mayAnswer(world) })
}

// mostNamed limits the ranks that a sentence names.
const mostNamed = 16

func newJob() *Job {
	return &Job{byKey: map[string]*group{}, nodes: map[string]*node{}, ended: map[int]string{}, torchFiles: map[int]string{}}
}
