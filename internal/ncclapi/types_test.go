package ncclapi

import (
	"fmt"
	"reflect"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl/dltest"
)

// The golden file has the offset and size of every field, as C lays them out.
func TestLayouts(t *testing.T) {
	text := ""
	for _, s := range []any{Config{}, CollConfig{}, EncryptionConfig{}, Properties{}, SignalDesc{}, SimInfo{}, DevCommRequirements{}} {
		typ := reflect.TypeOf(s)
		text += fmt.Sprintf("%s %d\n", typ.Name(), typ.Size())
		for f := range typ.Fields() {
			text += fmt.Sprintf("\t%2d %d %s\n", f.Offset, f.Type.Size(), f.Name)
		}
	}
	dltest.Golden(t, "testdata/layout.golden", text)
}

func TestConfigStamp(t *testing.T) {
	for version, size := range map[int32]uintptr{
		22304: 48, 22602: 48, 22703: 72, 22707: 72, 22803: 80, 22809: 80,
		22902: 88, 22907: 88, 23003: 96, 23007: 96, 23102: 112, 23203: 120, 23301: 120,
	} {
		c := NewConfig(version)
		require.Equal(t, size, c.Size, version)
		require.Equal(t, uint32(0xcafebeef), c.Magic)
		require.Equal(t, uint32(min(version, 23203)), c.Version, "fields that this package does not know stay at their defaults")
		c.Stamp(22803)
		require.Equal(t, []any{uintptr(80), uint32(22803)}, []any{c.Size, c.Version})
	}
}

func TestNewConfigLeavesAllToTheLibrary(t *testing.T) {
	v := reflect.ValueOf(NewConfig(22803)).Elem()
	for f, value := range v.Fields() {
		switch value.Kind() {
		case reflect.Int32:
			require.Equal(t, int64(Undefined), value.Int(), f.Name)
		case reflect.Pointer:
			require.True(t, value.IsNil(), f.Name)
		}
	}
}

func TestConfigTooNew(t *testing.T) {
	c := NewConfig(22304)
	field, _ := c.TooNew(22304)
	require.Empty(t, field)
	c.Blocking, c.MaxCTAs, c.SplitShare = 1, 16, 1
	field, _ = c.TooNew(22304)
	require.Empty(t, field)
	c.NChannelsPerNetPeer = 2
	field, since := c.TooNew(22707)
	require.Equal(t, []any{"nChannelsPerNetPeer", int32(22803)}, []any{field, since})
	field, _ = c.TooNew(22803)
	require.Empty(t, field)

	// Every field that a supported library may lack is known.
	v := reflect.ValueOf(c).Elem()
	for i := range v.NumField() {
		c := NewConfig(22304)
		f := reflect.ValueOf(c).Elem().Field(i)
		switch f.Kind() {
		case reflect.Int32:
			f.SetInt(1)
		case reflect.Pointer:
			f.Set(reflect.ValueOf(new(byte)))
		default:
			continue
		}
		field, _ := c.TooNew(22304)
		old := v.Type().Field(i).Offset < unsafe.Offsetof(c.TrafficClass)
		require.Equal(t, old, field == "", v.Type().Field(i).Name)
	}
}

// A parameter is text that C owns, of a length that C tells.
func TestParameters(t *testing.T) {
	so := dltest.Load(t, `
		int ncclGetVersion(int *v) { *v = 23004; return 0; }
		int ncclParamGetParameter(const char *key, const char **value, int *n) { *value = key[5] == 'D' ? "INFO and more" : 0; *n = 4; return 0; }
		static const char *keys[] = {"NCCL_DEBUG", "NCCL_ALGO"};
		int ncclParamGetAllParameterKeys(const char ***t, int *n) { *t = keys; *n = 2; return 0; }`)
	lib, err := newLib(func(name string) (uintptr, bool) {
		if p, ok := so.Symbol(name); ok {
			return p, true
		}
		return 1, true // never called
	}, "test")
	require.NoError(t, err)
	value, r := lib.ParamGetParameter("NCCL_DEBUG")
	require.Equal(t, []any{"INFO", Success}, []any{value, r})
	value, r = lib.ParamGetParameter("NCCL_ALGO")
	require.Equal(t, []any{"", Success}, []any{value, r})
	keys, r := lib.ParamGetAllParameterKeys()
	require.Equal(t, []any{[]string{"NCCL_DEBUG", "NCCL_ALGO"}, Success}, []any{keys, r})
}

func TestProperties(t *testing.T) {
	for version, size := range map[int32]uintptr{22902: 40, 22903: 40, 22907: 48, 23003: 56, 23007: 56, 23203: 56} {
		p := NewProperties(version)
		require.Equal(t, size, p.Size, version)
		require.LessOrEqual(t, p.Version, uint32(23007), "a newer library would write more fields")
	}
}

func TestCollConfigStamp(t *testing.T) {
	for version, size := range map[int32]uintptr{23102: 64, 23203: 72, 23301: 72} {
		c := NewCollConfig(version)
		require.Equal(t, size, c.Size, version)
		require.Equal(t, []any{uint32(0xcafebeef), uint32(min(version, 23203))}, []any{c.Magic, c.Version})
		require.EqualValues(t, 1, c.ForceAlgSelection)
		for _, v := range []int32{c.MinCTAs, c.MaxCTAs, c.NVLSCTAs, c.CGAClusterSize, c.CTAPolicy} {
			require.EqualValues(t, Undefined, v)
		}
		c.LaunchCompletionEvent = 1
		field, since := c.TooNew(version)
		require.Equal(t, version < 23203, field == "launchCompletionEvent" && since == 23203, version)
	}
}

func TestEncryptionConfig(t *testing.T) {
	c := NewEncryptionConfig(23203, "secret")
	require.Equal(t, []any{uintptr(32), uint32(0xcafebeef), uint32(23203), int32(1)}, []any{c.Size, c.Magic, c.Version, c.Mode})
	require.Equal(t, "secret\x00", string(unsafe.Slice(c.PSK, 7)))
}

func TestSimInfo(t *testing.T) {
	require.Equal(t, &SimInfo{Size: 24, Magic: 0x74685283, Version: 22803, EstimatedTime: -1}, NewSimInfo(22803))
}
