package dl

import (
	"errors"
	"strings"
)

// An Error reports that a library was not found or could not be loaded. It matches
// errors.ErrUnsupported.
type Error struct {
	Library string // such as "NCCL"
	Env     string // the variable that can set the library's path
	Tried   []Try  // in order
}

// A Try is one failed attempt to find a library.
type Try struct {
	Path   string // a file, a soname for the system's loader, or a pattern without matching files
	Reason string
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("dl: no usable library for " + e.Library)
	if e.Env != "" {
		b.WriteString(" (" + e.Env + " can name its path)")
	}
	b.WriteString("; tried:")
	for _, t := range e.Tried {
		b.WriteString("\n\t" + t.Path + ": " + t.Reason)
	}
	return b.String()
}

// Is reports whether target is errors.ErrUnsupported.
func (e *Error) Is(target error) bool { return target == errors.ErrUnsupported }

// A VersionError reports that a loaded library is too old, or lacks functions that its
// version should have. It matches errors.ErrUnsupported.
type VersionError struct {
	Library string // such as "NCCL"
	Path    string
	Loaded  string // such as "2.19.3"; "" if unknown
	Needed  string
	Missing []string // the missing C functions
}

func (e *VersionError) Error() string {
	s := e.Library
	if e.Loaded != "" {
		s += " " + e.Loaded
	}
	s += " at " + e.Path + ": Chorus needs " + e.Needed + " or newer"
	if len(e.Missing) > 0 {
		s += "; this one lacks " + strings.Join(e.Missing, ", ")
	}
	return s
}

// Is reports whether target is errors.ErrUnsupported.
func (e *VersionError) Is(target error) bool { return target == errors.ErrUnsupported }
