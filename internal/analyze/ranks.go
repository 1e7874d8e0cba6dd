package analyze

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// PyTorch's dumps do not contain the rank that wrote them. A pattern of the user finds it in the path. Otherwise "rank_N" in the
// name has it, or a number at the end of the name that the content permits. Sends and receives in the content have it, too. If all
// other ranks of the job have files, it is the one that is left, and if several are, the file stands for the rank.

// stem is the name of a file without its folder, compression and rank: files of one job have the same.
func stem(file string) string {
	name := withoutExtension(filepath.Base(file))
	if at := afterRank.FindStringSubmatchIndex(name); at != nil {
		name = name[:at[2]] + name[at[3]:]
	} else {
		name = strings.TrimRight(name, "0123456789")
	}
	return filepath.Join(filepath.Dir(file), name)
}

// afterRank matches the rank in the name of a file.
var afterRank = regexp.MustCompile(`rank_?([0-9]+)`)

// worldOf returns the rank that a file's name contains, which is certain if it
// follows the word rank.
func worldOf(file string) (rank int, certain, ok bool) {
	base := withoutExtension(filepath.Base(file))
	// A copy may have more numbers, as in nccl_trace_rank_0.1 or rank_0_attempt_1.
	if m := afterRank.FindStringSubmatch(base); m != nil {
		if rank, err := strconv.Atoi(m[1]); err == nil && rank < mostRanks {
			return rank, true, true
		}
	}
	digits := base[len(strings.TrimRight(base, "0123456789")):]
	rank, err := strconv.Atoi(digits)
	ok = err == nil && rank < mostRanks && len(digits) < len(base) && !strings.ContainsAny(strings.TrimSuffix(base, digits), "0123456789")
	return rank, false, ok
}

// withoutExtension removes endings such as .pickle.zst, but not one with a number, as in nccl_trace_rank_0.1.
func withoutExtension(name string) string {
	for {
		ext := filepath.Ext(name)
		if ext == "" || ext == name || strings.ContainsAny(ext, "0123456789") {
			return name
		}
		name = strings.TrimSuffix(name, ext)
	}
}

// setRank sets the rank of a dump of PyTorch if the file alone determines it.
func (d *dump) setRank(pattern *regexp.Regexp) error {
	d.world = -1
	if d.fromChorus() || d.service != nil {
		return nil
	}
	if pattern != nil {
		m := pattern.FindStringSubmatch(d.file)
		if len(m) < 2 {
			return fmt.Errorf("the pattern %q of the flag --rank-pattern does not match the file's path, or has no group in parentheses", pattern)
		}
		rank, err := strconv.Atoi(m[1])
		if err != nil || rank >= mostRanks {
			return fmt.Errorf("the pattern %q of the flag --rank-pattern finds the rank %.40q in the file's path: want a number below %d", pattern, m[1], mostRanks)
		}
		d.world = rank
		return nil
	}
	if err := d.findCandidates(); err != nil {
		return err
	}
	rank, certain, ok := worldOf(d.file)
	switch {
	case ok && (certain || d.all == nil || slices.Contains(d.candidates, rank)):
		d.world = rank
	case len(d.candidates) == 1:
		d.world = d.candidates[0]
	}
	return nil
}

// findCandidates sets the ranks that may have written a dump: all groups with operations have them, and sends and receives name
// the one that issued them.
func (d *dump) findCandidates() error {
	var list []int
	narrow := func(to []int) {
		if list == nil {
			list = slices.Clone(to)
			return
		}
		list = slices.DeleteFunc(list, func(rank int) bool { return !slices.Contains(to, rank) })
	}
	byGroup, _ := d.divide()
	for id, c := range d.config {
		if c.unknown() {
			continue
		}
		all, err := ranksOf(c.Ranks)
		if err != nil {
			return err
		}
		if len(all) > len(d.all) {
			d.all = all
		}
		if len(byGroup[id]) == 0 {
			continue
		}
		narrow(all)
		for _, e := range byGroup[id] {
			if e.peer >= 0 && e.self < len(all) {
				narrow(all[e.self : e.self+1])
				break
			}
		}
	}
	if list == nil {
		list = slices.Clone(d.all)
	}
	if len(list) == 0 && d.all != nil {
		return errors.New("no rank is in all groups whose operations the file has: it is not the dump of one process")
	}
	d.candidates = list
	return nil
}

// setOtherRanks sets the ranks that the files do not determine alone, of dumps of one job.
func setOtherRanks(dumps []*dump) {
	taken := map[int]bool{}
	var open []*dump
	for _, d := range dumps {
		switch {
		case d.fromChorus() || d.service != nil:
		case d.world >= 0:
			taken[d.world] = true
		default:
			open = append(open, d)
		}
	}
	left := func(d *dump) []int {
		if d.all == nil { // the file has the ranks of no group
			for rank := 0; ; rank++ {
				if !taken[rank] {
					return []int{rank, rank + 1} // and others: none is certain
				}
			}
		}
		return slices.DeleteFunc(slices.Clone(d.candidates), func(rank int) bool { return taken[rank] })
	}
	for again := true; again; {
		again = false
		open = slices.DeleteFunc(open, func(d *dump) bool {
			list := left(d)
			if len(list) != 1 {
				return false
			}
			d.world, d.eliminated, again = list[0], true, true
			taken[list[0]] = true
			return true
		})
	}
	slices.SortStableFunc(open, func(a, b *dump) int { return cmp.Compare(len(a.candidates), len(b.candidates)) })
	for _, d := range open {
		if list := left(d); len(list) > 0 {
			d.world, d.guessed = list[0], true
			taken[list[0]] = true
		}
	}
}

// unknown reports whether PyTorch did not record the ranks of the group, as for gloo.
func (c *rawConfig) unknown() bool { return c.Rank == nil && strings.TrimSpace(c.Ranks) == "[]" }

// setUnknownGroups adds the groups whose ranks PyTorch did not record to the configurations of the dumps, after their ranks are set. The
// default group has all ranks up to the largest one, and another group those with operations.
func setUnknownGroups(dumps []*dump) {
	largest, members := 0, map[[2]string][]int{}
	var affected []*dump
	for _, d := range dumps {
		if d.fromChorus() || d.service != nil || d.world < 0 {
			continue
		}
		largest = max(largest, d.world)
		for id, c := range d.config {
			if c.unknown() {
				delete(d.config, id)
				d.unnamed = true
			}
		}
		if !d.unnamed {
			continue
		}
		affected = append(affected, d)
		for _, e := range d.entries {
			if key := [2]string{e.groupName, e.groupDesc}; !slices.Contains(members[key], d.world) {
				members[key] = append(members[key], d.world)
			}
		}
	}
	for key, ranks := range members {
		if key[1] == "default_pg" {
			ranks = nil
			for rank := range largest + 1 {
				ranks = append(ranks, rank)
			}
		}
		slices.Sort(ranks)
		for _, d := range affected {
			if _, known := d.config[key[0]]; !known && slices.Contains(ranks, d.world) {
				d.config[key[0]] = rawConfig{Name: key[0], Desc: key[1], Ranks: strings.ReplaceAll(fmt.Sprint(ranks), " ", ", ")}
			}
		}
	}
}
