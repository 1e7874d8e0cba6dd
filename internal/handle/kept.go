package handle

import (
	"slices"
	"sync"
	"sync/atomic"
)

// A Key identifies the values that one package stores with the objects of another package.
// Keys are compared by address: each one is a package variable.
type Key struct{ _ byte }

// A Map is for few keys that are looked up often and rarely added: a lookup compares all
// keys. Its methods may be called by any goroutine. The zero value is empty. A Map must not
// be copied.
type Map struct {
	mu   sync.Mutex // held while the list is changed
	list atomic.Pointer[[]entry]
}

type entry struct {
	key   *Key
	value any
}

// Load returns the value of a key.
func (m *Map) Load(key *Key) (value any, ok bool) {
	if list := m.list.Load(); list != nil {
		for i := range *list {
			if e := &(*list)[i]; e.key == key {
				return e.value, true
			}
		}
	}
	return nil, false
}

// LoadOrMake returns the value of a key, and makes it if necessary. Other goroutines that
// add a key wait meanwhile; make must not add one itself. After an error the key has no
// value.
func (m *Map) LoadOrMake(key *Key, make func() (any, error)) (any, error) {
	if v, ok := m.Load(key); ok {
		return v, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if v, ok := m.Load(key); ok {
		return v, nil
	}
	v, err := make()
	if err != nil {
		return nil, err
	}
	m.store(key, v)
	return v, nil
}

// LoadOrStore returns the value of a key, which is value if there was none.
func (m *Map) LoadOrStore(key *Key, value any) any {
	m.mu.Lock()
	defer m.mu.Unlock()
	if v, ok := m.Load(key); ok {
		return v
	}
	m.store(key, value)
	return value
}

func (m *Map) store(key *Key, value any) {
	var list []entry
	if old := m.list.Load(); old != nil {
		list = slices.Clone(*old)
	}
	list = append(list, entry{key, value})
	m.list.Store(&list)
}

// Clear removes all keys and returns their values in the order they were added.
func (m *Map) Clear() (values []any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if list := m.list.Swap(nil); list != nil {
		for _, e := range *list {
			values = append(values, e.value)
		}
	}
	return values
}
