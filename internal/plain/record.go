package plain

import "reflect"

// Record applies Text to all texts of the record that v points to, such as a message of
// another process. It changes texts in structs, slices and pointers, but not in maps,
// interfaces and fields that encoding/json does not set.
func Record(v any) { quoteTexts(reflect.ValueOf(v)) }

func quoteTexts(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			quoteTexts(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() || f.Anonymous {
				quoteTexts(v.Field(i))
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return
		}
		for i := range v.Len() {
			quoteTexts(v.Index(i))
		}
	case reflect.String:
		if v.CanSet() {
			v.SetString(Text(v.String()))
		}
	}
}
