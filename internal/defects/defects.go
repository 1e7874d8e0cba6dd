// Package defects lists known defects of NCCL by version. Package nccl and the choice of strategies
// read the rows that they avoid; chorus info and chorus doctor show all rows of the loaded version.
package defects

import (
	"fmt"
	"slices"
)

// A Defect is a fault of a range of versions. Versions are NCCL's codes: 22803 is 2.28.3.
type Defect struct {
	ID     string
	From   int32  // the first version that has it; 0: not known
	Before int32  // the first version without it; 0: none is known
	Fault  string // what goes wrong
	When   string // the condition, which fits after "when"
	// Chorus says what Chorus does about it.
	Chorus string
	// Open says that a program can meet the defect although Chorus does what Chorus says.
	Open   bool
	Source string // release notes or an issue, as project#number
}

// Affects reports whether a version has the defect.
func (d *Defect) Affects(version int32) bool {
	return version >= d.From && (d.Before == 0 || version < d.Before)
}

// Range describes the versions.
func (d *Defect) Range() string {
	switch {
	case d.From == 0 && d.Before == 0:
		return "all known versions"
	case d.From == 0:
		return "before " + text(d.Before)
	case d.Before == 0:
		return text(d.From) + " and newer"
	case d.Before == d.From+1:
		return text(d.From)
	}
	return text(d.From) + " to before " + text(d.Before)
}

func text(code int32) string { return fmt.Sprintf("%d.%d.%d", code/10000, code%10000/100, code%100) }

// Of returns the defects of a version, those that a program can meet first.
func Of(version int32) (list []*Defect) {
	for _, open := range []bool{true, false} {
		for _, d := range All {
			if d.Open == open && d.Affects(version) {
				list = append(list, d)
			}
		}
	}
	return slices.Clip(list)
}
