//! The messages of a conversation, as clients send them and templates read them.
//!
//! Known fields are typed; everything else a client sends passes through to the template unchanged.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// What is said. `null` for an assistant turn that only calls tools.
    #[serde(default)]
    pub content: Option<Content>,
    /// The thinking that preceded an assistant's answer, without its marks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The tools that an assistant turn calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a `tool` message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The speaker's or tool's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// All other fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// Text, or parts of several kinds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Parts such as `{"type": "text", "text": ".."}` or `{"type": "image_url", ..}`.
    Parts(Vec<Value>),
}

/// One call of a tool.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ToolCall {
    /// Links the call to the message with its result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The kind of tool, usually `function`.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// What is called.
    pub function: FunctionCall,
    /// All other fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// A function and its arguments.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct FunctionCall {
    /// The function's name.
    pub name: String,
    /// An object, or its JSON text (the OpenAI wire form). Templates always see the object.
    #[serde(default)]
    pub arguments: Value,
    /// All other fields.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

fn null_as_empty<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<ToolCall>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl Message {
    /// A message of plain text.
    pub fn text(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: Some(Content::Text(content.to_owned())), ..Self::default() }
    }

    /// The message as templates expect it: arguments given as JSON text become the object that they spell.
    pub(super) fn for_template(&self) -> minijinja::Value {
        use minijinja::value::Serde;
        let spelled = |call: &ToolCall| call.function.arguments.is_string();
        if !self.tool_calls.iter().any(spelled) {
            return Serde(self).into();
        }
        let mut message = self.clone();
        for call in &mut message.tool_calls {
            let object = call.function.arguments.as_str().and_then(|text| serde_json::from_str(text).ok());
            if let Some(object) = object.filter(Value::is_object) {
                call.function.arguments = object;
            }
        }
        Serde(message).into()
    }
}
